"""The compose file, the Dockerfile and the README name the same things; results go where any user may write."""

from __future__ import annotations

import fnmatch
import re
import shlex
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from coarse.cli.main import COMMANDS, build_parser

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).resolve().parents[2]
DOCKER = ROOT / "docker"
COMPOSE = yaml.safe_load((DOCKER / "compose.yaml").read_text())
SERVICES = COMPOSE["services"]
DOCKERFILE = (DOCKER / "Dockerfile").read_text()
STAGES = re.findall(r"^FROM \S+ AS (\w+)$", DOCKERFILE, re.MULTILINE)
each_service = pytest.mark.parametrize("name", sorted(SERVICES))


def words_of(name):
    """A service's command, with the defaults of its variables."""
    return [re.sub(r"\$\{\w+:-(.*?)\}", r"\1", word) for word in SERVICES[name].get("command", [])]


def test_every_stage_but_the_parts_of_others_has_a_service():
    parts = {"base", "tools", "wheel"}
    assert {service["build"]["target"] for service in SERVICES.values()} == set(STAGES) - parts
    assert STAGES[-1] == "coarse"  # what `docker build` without a target makes


@each_service
def test_a_service_builds_the_dockerfile(name):
    build = SERVICES[name]["build"]
    assert (DOCKER / build["context"] / build["dockerfile"]).samefile(DOCKER / "Dockerfile")
    assert set(build["args"]) <= set(re.findall(r"^ARG (\w+)", DOCKERFILE, re.MULTILINE))


def test_services_with_the_same_image_build_the_same():
    by_image = {}
    for service in SERVICES.values():
        assert by_image.setdefault(service["image"], service["build"]) == service["build"]


@each_service
def test_a_service_writes_as_the_user_to_a_folder_that_the_user_has(name):
    service = SERVICES[name]
    (volume,) = service["volumes"]
    assert (volume["target"], volume["bind"]) == ("/results", {"create_host_path": False})
    source = re.fullmatch(r"\$\{RESULTS:-(.*)\}", volume["source"]).group(1)
    assert (DOCKER / source).is_dir()
    assert service["user"] == ("root" if name == "dax" else "${UID:-1000}:${GID:-1000}")


@each_service
def test_results_go_to_the_mounted_folder(name):
    words = words_of(name)
    for option, value in pairwise(words):
        if option in ("--results", "--json", "--output", "--report"):
            assert value.startswith("/results/")


def test_the_image_lets_any_user_write_results_and_caches():
    for folder in ("/results", "/home/trainer"):
        assert re.search(rf"1777\b.* {folder}\b|1777 {folder}\b", DOCKERFILE)
    assert "HOME=/home/trainer" in DOCKERFILE


@each_service
def test_files_and_options_of_a_command_exist(name, tmp_path):
    words = [word.replace("/results/", f"{tmp_path}/") for word in words_of(name)]
    for word in words:
        if word.startswith(("examples/", "benchmarks/")):
            assert (ROOT / word).is_file()
    if words[:1] == ["coarse"]:
        _, unknown = build_parser(list(COMMANDS)).parse_known_args(words[1:])
        assert not unknown
    if words[:2] == ["python", "-m"]:
        module = ROOT / words[2].replace(".", "/")
        assert module.is_dir() or module.with_suffix(".py").is_file()


def test_what_the_dockerfile_copies_is_in_its_context():
    admitted = [
        line[1:]
        for line in (DOCKER / "Dockerfile.dockerignore").read_text().splitlines()
        if line.startswith("!")
    ]
    for line in re.findall(r"^COPY (?!--from=)(.*)$", DOCKERFILE, re.MULTILINE):
        for source in shlex.split(line)[:-1]:
            assert (ROOT / source).exists()
            top = Path(source).parts[:1]
            assert not top or any(fnmatch.fnmatch(top[0], pattern) for pattern in admitted)


def test_stages_install_extras_of_the_project():
    for extra in re.findall(r"requirements_of\.py (\w+)\)", DOCKERFILE):
        done = subprocess.run(
            [sys.executable, DOCKER / "requirements_of.py", extra],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
        packages = re.findall(r"^[\w-]+", done.stdout, re.MULTILINE)
        assert {"tensorflow": "keras", "trainers": "lightning"}[extra] in packages


def test_the_readme_lists_every_service_and_its_target():
    rows = re.findall(r"^\| (`.*?) \| `(\w+)` \|", (DOCKER / "README.md").read_text(), re.MULTILINE)
    listed = {name: target for names, target in rows for name in re.findall(r"`([\w-]+)`", names)}
    assert listed == {name: service["build"]["target"] for name, service in SERVICES.items()}
