"""Files of checkpoints: accessed by descriptor, never through a symbolic link, never outside of their folder."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import re
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType

from coarse.errors import CheckpointError

Observer = Callable[[str, str], None]
"""Called before each slow operation with its name ("create", "write", "fsync", "rename", "remove") and its subject:
the failpoints of tests. If it raises, the operation does not run."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,200}")
_DIRECTORY_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # opening a FIFO must not wait
_CREATE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_STAGING_BYTES = 4 << 20  # collected before a write past the page cache
_ALIGNED_BYTES = 64 << 10  # whose multiples such writes take; disks require multiples of their blocks


def check_name(name: str) -> str:
    """Returns a name of a file of a checkpoint.

    Raises:
        CheckpointError: If it could lead out of its folder, or is not a plain name.
    """
    if not _NAME.fullmatch(name):
        raise CheckpointError(
            f"{name!r} is not a valid name of a checkpoint's file: use letters, digits, dots, underscores and "
            "hyphens only, so that it cannot point outside the folder"
        )
    return name


class Folder:
    """One folder, held open by its descriptor. Close it, or use it in a `with` block; one thread at a time.

    Folder.open() and enter() create it.
    """

    def __init__(self, path: Path, descriptor: int, observe: Observer) -> None:
        self.path = path
        self._descriptor = descriptor
        self._observe = observe

    @classmethod
    def open(
        cls, path: str | os.PathLike[str], *, create: bool = False, observe: Observer | None = None
    ) -> Folder:
        """Opens a folder; `path` itself may contain symbolic links, because the user chose it.

        Args:
            path: Path of the folder.
            create: Whether to create it, and its parents, if it does not exist.
            observe: For tests.

        Raises:
            CheckpointError: If the folder does not exist.
            OSError: If it cannot be opened or created.
        """
        place = Path(path).expanduser().absolute()
        observe = observe or (lambda operation, name: None)
        if create:
            _make(place, observe)
        try:
            descriptor = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError):
            raise CheckpointError(f"there is no folder {place}") from None
        return cls(place, descriptor, observe)

    def enter(self, name: str, *, create: bool = False) -> Folder:
        """Opens a folder in this one.

        Raises:
            CheckpointError: If the folder does not exist or is a symbolic link.
        """
        check_name(name)
        if create:
            with suppress(FileExistsError):
                os.mkdir(name, 0o700, dir_fd=self._descriptor)
        try:
            descriptor = os.open(name, _DIRECTORY_FLAGS, dir_fd=self._descriptor)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
                raise
            raise CheckpointError(f"{self.path / name}: {_what_is_wrong(error)}") from None
        return Folder(self.path / name, descriptor, self._observe)

    @property
    def identity(self) -> tuple[int, int]:
        """Device and inode, which identify the folder however it was opened."""
        found = os.fstat(self._descriptor)
        return found.st_dev, found.st_ino

    @property
    def is_in_place(self) -> bool:
        """Whether the folder is still at the path where it was opened."""
        try:
            return os.path.samestat(os.stat(self.path), os.fstat(self._descriptor))
        except OSError:
            return False

    def names(self) -> list[str]:
        """Names of the folder's entries, in no particular order."""
        return os.listdir(self._descriptor)

    def has(self, name: str) -> bool:
        """Whether an entry of that name exists, even a dangling link."""
        try:
            os.stat(name, dir_fd=self._descriptor, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return True

    def is_folder(self, name: str) -> bool:
        """Whether `name` is a folder, and not a link to one."""
        try:
            found = os.stat(name, dir_fd=self._descriptor, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return stat.S_ISDIR(found.st_mode)

    def size_of(self, name: str) -> int:
        """Length of a file in bytes.

        Raises:
            CheckpointError: If no such regular file exists.
        """
        with self.reading(name) as descriptor:
            return os.fstat(descriptor).st_size

    @contextmanager
    def reading(self, name: str, *, past_cache: bool = False) -> Iterator[int]:
        """Opens a file for reading; closes the descriptor at the end of the block.

        Args:
            name: Name of the file.
            past_cache: Whether to read from disk, without a copy in the page cache, if the file system supports it;
                see has_cache() then.

        Raises:
            CheckpointError: If it is missing, a symbolic link, or not a regular file.
        """
        check_name(name)
        try:
            descriptor = os.open(name, _READ_FLAGS, dir_fd=self._descriptor)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO):
                raise
            raise CheckpointError(f"{self.path / name}: {_what_is_wrong(error)}") from None
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise CheckpointError(f"{self.path / name}: is not a regular file")
            if past_cache:
                _go_past_cache(descriptor)
            yield descriptor
        finally:
            os.close(descriptor)

    def read(self, name: str, *, limit_bytes: int) -> bytes:
        """The contents of a small file.

        Raises:
            CheckpointError: As for reading(), or if it is longer than `limit_bytes`.
        """
        with self.reading(name) as descriptor:
            size = os.fstat(descriptor).st_size
            if size > limit_bytes:
                raise CheckpointError(
                    f"{self.path / name}: {size} bytes, more than the allowed {limit_bytes}"
                )
            with open(descriptor, "rb", closefd=False) as file:
                return file.read(limit_bytes)

    @contextmanager
    def writing(self, name: str, *, past_cache: bool = False) -> Iterator[NewFile]:
        """Creates a file of mode 0600; at the end of the block it is on disk.

        Args:
            name: Name of the file.
            past_cache: Whether to write without a copy in the page cache, if the file system supports it.

        Raises:
            FileExistsError: If a file of that name exists.
            OSError: If it cannot be written.
        """
        check_name(name)
        shown = f"{self.path.name}/{name}"
        path = self.path / name
        with _named(path):
            self._observe("create", shown)
            descriptor = os.open(name, _CREATE_FLAGS, 0o600, dir_fd=self._descriptor)
        try:
            file = NewFile(descriptor, path, shown, self._observe, past_cache=past_cache)
            yield file
            file.finish()
            with _named(path):
                self._observe("fsync", shown)
                os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def open_lock(self, name: str) -> int:
        """A descriptor of a permanent empty file for locking; the caller closes it.

        Raises:
            OSError: If it can be neither created nor opened.
        """
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        return os.open(check_name(name), flags, 0o600, dir_fd=self._descriptor)

    def replace(self, name: str, contents: bytes) -> None:
        """Replaces the contents of a small file atomically: a reader sees all of the old or all of the new contents.

        One process at a time for each name.
        """
        temporary = f"{name}.tmp"
        self.remove(temporary)
        try:
            with self.writing(temporary) as file:
                file.write(contents)
            self.rename(temporary, name)
        except BaseException:
            with suppress(OSError):  # the cause of the failed write may also prevent this
                self.remove(temporary)
            raise

    def rename(self, old: str, new: str) -> None:
        """Renames within the folder, and syncs the folder to disk."""
        check_name(old)
        check_name(new)
        with _named(self.path / new):
            self._observe("rename", f"{old} -> {new}")
            os.rename(old, new, src_dir_fd=self._descriptor, dst_dir_fd=self._descriptor)
        self.sync()

    def sync(self) -> None:
        """Syncs all names in the folder to disk."""
        with _named(self.path):
            self._observe("fsync", f"{self.path.name}/")
            os.fsync(self._descriptor)

    def remove(self, name: str) -> None:
        """Removes a file, or a folder with its files, if it exists. Does not follow links."""
        check_name(name)
        if self.is_folder(name):
            with self.enter(name) as folder:
                for inner in folder.names():
                    if folder.is_folder(inner):
                        raise CheckpointError(
                            f"{folder.path / inner}: a folder that does not belong to a checkpoint; not removed"
                        )
                    folder._unlink(inner)
            self._observe("remove", name)
            os.rmdir(name, dir_fd=self._descriptor)
        elif self.has(name):
            self._unlink(name)

    def close(self) -> None:
        """Closes the folder. Idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> Folder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _unlink(self, name: str) -> None:
        self._observe("remove", f"{self.path.name}/{name}")
        os.unlink(name, dir_fd=self._descriptor)


class NewFile:
    """A file that is written sequentially. Folder.writing() creates it.

    Past the page cache, the disk reads pages of this process: the system copies nothing, writes nothing back later,
    and keeps the cached pages of other files.
    """

    def __init__(
        self, descriptor: int, path: Path, shown: str, observe: Observer, *, past_cache: bool
    ) -> None:
        self._descriptor = descriptor
        self._path = path
        self._shown = shown
        self._observe = observe
        self._is_past_cache = past_cache and _go_past_cache(descriptor)
        self._staging = memoryview(mmap.mmap(-1, _STAGING_BYTES)) if self._is_past_cache else None
        self._num_staged = 0
        self._reserved: memoryview | None = None
        self._unstaged = bytearray()  # reserved, where nothing is staged

    def reserve(self, num_bytes: int) -> memoryview:
        """Memory for the next `num_bytes`, which write() appends without a copy. Nothing else is appended before."""
        if self._staging is None:
            if len(self._unstaged) < num_bytes:
                self._unstaged = bytearray(num_bytes)
            return memoryview(self._unstaged)[:num_bytes]
        if self._num_staged + num_bytes > len(self._staging):
            self._write_staged()
        end = self._num_staged + num_bytes
        if end > len(self._staging):
            larger = memoryview(mmap.mmap(-1, end))
            larger[: self._num_staged] = self._staging[: self._num_staged]
            self._staging = larger
        self._reserved = self._staging[self._num_staged : end]
        return self._reserved

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Appends `data`."""
        if self._staging is None:
            return self._write(memoryview(data))
        if data is self._reserved:
            self._reserved = None
            self._num_staged += len(data)
            if self._num_staged >= _STAGING_BYTES:
                self._write_staged()
            return None
        view = memoryview(data)
        while view:
            part = view[: len(self._staging) - self._num_staged]
            self._staging[self._num_staged : self._num_staged + len(part)] = part
            self._num_staged += len(part)
            view = view[len(part) :]
            if self._num_staged == len(self._staging):
                self._write_staged()

    def finish(self) -> None:
        """Writes appended data that is still buffered."""
        if self._staging is not None and self._num_staged:
            self._go_through_cache()  # the end is not a whole page
            self._write(self._staging[: self._num_staged])
            self._num_staged = 0

    def flush(self) -> None:
        """Writes cached data to disk and drops it from the page cache, so that checkpoints do not fill the cache."""
        if self._is_past_cache:
            return
        with _named(self._path):
            self._observe("fsync", self._shown)
            os.fdatasync(self._descriptor)
        os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)

    def _write_staged(self) -> None:
        """Writes what was staged, but its end that is no whole block."""
        assert self._staging is not None
        rest = self._num_staged % _ALIGNED_BYTES
        whole = self._num_staged - rest
        self._write(self._staging[:whole])
        self._staging[:rest] = self._staging[whole : self._num_staged]
        self._num_staged = rest

    def _write(self, view: memoryview) -> None:
        while view:
            try:
                with _named(self._path):
                    self._observe("write", self._shown)
                    count = os.write(self._descriptor, view)
            except OSError as error:
                if not self._is_past_cache or error.errno != errno.EINVAL:
                    raise
                self._go_through_cache()  # a disk with larger blocks, or one that took less than a page
                continue
            view = view[count:]

    def _go_through_cache(self) -> None:
        self._is_past_cache = False
        go_through_cache(self._descriptor)


def has_cache(descriptor: int) -> bool:
    """Whether a file's I/O uses the page cache; otherwise it uses whole pages only."""
    return not fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT


def go_through_cache(descriptor: int) -> None:
    """Switches a file's I/O back to the page cache."""
    fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) & ~os.O_DIRECT)


def _go_past_cache(descriptor: int) -> bool:
    """Switches a file's I/O to bypass the page cache; returns False if the file system does not support that."""
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) | os.O_DIRECT)
    except OSError:
        return False
    return True


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Adds the file's path to system errors, which only contain a descriptor or a name within a folder."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def _what_is_wrong(error: OSError) -> str:
    if error.errno == errno.ENOENT:
        return "is missing"
    if error.errno == errno.ELOOP:
        return "is a symbolic link, which checkpoints never contain"
    return "is not the expected kind of file"


def _make(place: Path, observe: Observer) -> None:
    """Creates a folder and its parents, and syncs their names to disk."""
    missing = [each for each in (place, *place.parents) if not each.exists()]
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    for made in missing:
        observe("fsync", f"{made.parent.name}/")
        with suppress(PermissionError):  # a folder that allows creating names, but not listing them
            descriptor = os.open(made.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
