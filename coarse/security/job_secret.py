"""The secret of a job, by which a worker tells messages of its job from a stranger's.

`coarse run` draws one for each job of one node and hands it down in the environment; for several nodes the user
chooses one (docs/design/security.md). Without a secret proofs prove nothing: everybody can make them.
"""

from __future__ import annotations

import hmac
import struct
from dataclasses import dataclass

from coarse.errors import RendezvousError

PROOF_BYTES = 32
_MARK = b"\0coarse:proof\0"
_LENGTH = struct.Struct("!I")


@dataclass(frozen=True, slots=True)
class JobSecret:
    """A secret that only the processes of one job know.

    Args:
        value: The secret; b"" if the job has none.
    """

    value: bytes = b""

    def __repr__(self) -> str:
        return f"JobSecret({'...' if self.value else ''})"

    def prove(self, purpose: bytes, *parts: bytes) -> bytes:
        """PROOF_BYTES by which a process that knows the secret proves that it sent `parts`.

        HMAC-SHA256 of all of it, each part behind its length. Proofs of one purpose are none of another.
        """
        said = b"".join(_LENGTH.pack(len(part)) + part for part in (purpose, *parts))
        return hmac.digest(self.value, said, "sha256")

    def is_proof(self, proof: bytes, purpose: bytes, *parts: bytes) -> bool:
        """Whether prove() has made `proof`."""
        return hmac.compare_digest(proof, self.prove(purpose, *parts))

    def seal(self, key: str, value: bytes) -> bytes:
        """`value` with a proof that this job has set it for `key`; as it is without a secret."""
        if not self.value:
            return value
        return _MARK + self.prove(b"entry", key.encode(), value) + value

    def open(self, key: str, sealed: bytes) -> bytes:
        """The value that was sealed for `key`.

        Raises:
            RendezvousError: If somebody has set it who does not know the secret.
        """
        is_sealed = sealed.startswith(_MARK)
        if not self.value:
            if is_sealed:
                raise RendezvousError(
                    f"{key!r}, which workers use to find each other, carries a proof of COARSE_JOB_SECRET, but "
                    "this worker has no secret. Start all workers of the job with the same one."
                )
            return sealed
        proof, value = sealed[len(_MARK) :][:PROOF_BYTES], sealed[len(_MARK) + PROOF_BYTES :]
        if not is_sealed or not self.is_proof(proof, b"entry", key.encode(), value):
            raise RendezvousError(
                f"refused {key!r}, which workers use to find each other: it carries no valid proof of this "
                "job's COARSE_JOB_SECRET. Either a process outside the job wrote it to the store at "
                "MASTER_ADDR and MASTER_PORT, or a worker was started with another secret or none."
            )
        return value
