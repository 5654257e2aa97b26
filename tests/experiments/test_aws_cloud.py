"""The CloudFormation template and the scripts of an instance, as far as they can be checked without AWS."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from experiments.aws.instances import INSTANCES

ROOT = Path(__file__).resolve().parents[2]
AWS = ROOT / "experiments" / "aws"
TEMPLATE = AWS / "campaign.yaml"
SCRIPTS = [*sorted(AWS.glob("*.sh")), ROOT / "benchmarks" / "build_horovod.sh"]


def program(name):
    """A program of the environment that runs the tests."""
    found = shutil.which(name, path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    return found or pytest.skip(f"{name} is not installed")


def template():
    """The template as a value, and its shorthand functions as pairs of name and argument."""
    yaml = pytest.importorskip("yaml")
    loader = type("Loader", (yaml.SafeLoader,), {})

    def construct(loader, suffix, node):
        for kind in ("scalar", "sequence", "mapping"):
            if node.id == kind:
                return (suffix, getattr(loader, f"construct_{kind}")(node))

    loader.add_multi_constructor("!", construct)
    return yaml.load(TEMPLATE.read_text(), Loader=loader)


def user_data():
    _, text = template()["Resources"]["Template"]["Properties"]["LaunchTemplateData"]["UserData"][
        "Fn::Base64"
    ]
    return text


def test_the_template_is_valid():
    """Against AWS's own schemas, which cfn-lint brings: resources, properties, types, instance types by region."""
    regions = ("us-east-1", "us-west-2", "eu-west-1", "ap-northeast-1")
    done = subprocess.run(
        [program("cfn-lint"), "--regions", *regions, "--template", TEMPLATE], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout


def test_the_template_has_no_yaml_aliases():
    """CloudFormation refuses them; cfn-lint does not."""
    yaml = pytest.importorskip("yaml")
    assert not [token for token in yaml.scan(TEMPLATE.read_text()) if isinstance(token, yaml.AliasToken)]


def test_the_template_starts_the_instances_that_are_offered():
    allowed = template()["Parameters"]["InstanceType"]["AllowedValues"]
    assert set(allowed) == {name for name, each in INSTANCES.items() if each.gpu and each.is_offered}


def test_instances_terminate_and_nothing_outside_reaches_them():
    resources = template()["Resources"]
    launched = resources["Template"]["Properties"]["LaunchTemplateData"]
    assert launched["InstanceInitiatedShutdownBehavior"] == "terminate"
    assert "SecurityGroupIngress" not in resources["Group"]["Properties"]
    assert resources["Together"]["Properties"]["SourceSecurityGroupId"] == ("Ref", "Group")
    for name in ("First", "Second"):
        assert resources[name]["Properties"]["LaunchTemplate"]["LaunchTemplateId"] == ("Ref", "Template")


def test_the_template_gives_the_script_its_variables():
    described = set(re.findall(r"^#   ([A-Z_]+) ", (AWS / "campaign.sh").read_text(), re.MULTILINE))
    given = set(re.findall(r"^([A-Z_]+)=", user_data(), re.MULTILINE))
    assert given == described | {"AWS_DEFAULT_REGION"}


def test_user_data_is_a_valid_script(tmp_path):
    script = tmp_path / "user-data"
    script.write_text(re.sub(r"\$\{[\w:]+\}", "value", user_data()))
    subprocess.run(["bash", "-n", script], check=True)
    subprocess.run([program("shellcheck"), script], check=True)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_valid(script):
    subprocess.run(["bash", "-n", script], check=True)
    subprocess.run([program("shellcheck"), script], check=True)


def test_python_packages_are_pinned():
    pins = dict(re.findall(r"^([\w-]+)==(\S+)$", (AWS / "constraints.txt").read_text(), re.MULTILINE))
    assert f"torch=={pins['torch']}\n" in (ROOT / "Makefile").read_text()
    assert f"version={pins['horovod']}\n" in (ROOT / "benchmarks" / "build_horovod.sh").read_text()
    project = (ROOT / "pyproject.toml").read_text()
    for extra in (
        "torch",
        "tensorflow",
        "examples",
        "trainers",
        "gpu",
        "cuda",
        "checkpoint",
        "plot",
        "bench",
    ):
        (listed,) = re.findall(rf"^{extra} = (\[.*\])$", project, re.MULTILINE)
        assert set(re.findall(r'"([\w-]+)', listed)) <= set(pins)


STAND_IN = """#!/bin/bash
echo "$(basename "$0") $*" >>"$TOLD"
"""


class Instance:
    """A checkout with the real campaign.sh, and stand-ins for setup.sh, Python, AWS's client and the power switch."""

    def __init__(self, folder):
        self.folder, self.told = folder, folder / "told"
        self.script = folder / "coarse" / "experiments" / "aws" / "campaign.sh"
        self.script.parent.mkdir(parents=True)
        shutil.copy(AWS / "campaign.sh", self.script)
        self.bucket = folder / "bucket"
        self.bucket.mkdir()
        for name in ("shutdown", "reboot", "dpkg-query", "nvidia-smi"):
            self.write(folder / "bin" / name, STAND_IN)
        self.write(
            folder / "bin" / "aws",
            STAND_IN
            + """
shift
[[ $1 = ls ]] && exec ls "$BUCKET/$(basename "$2")"
[[ $* = *--recursive* ]] && exec cp -r "$4/." "$BUCKET"
if [[ $3 = - ]]; then cat >"$BUCKET/$(basename "$4")"; else cat "$BUCKET/$(basename "$3")"; fi
""",
        )
        self.set_up("exit 0")
        self.train("mkdir -p runs/aws && echo result >runs/aws/runs.jsonl")

    def write(self, path, text):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)

    def set_up(self, outcome):
        self.write(self.script.parent / "setup.sh", STAND_IN + outcome + "\n")

    def train(self, outcome):
        """The outcome of `python -m experiments.aws.run`; other modules do nothing."""
        run = f"if [[ $2 = experiments.aws.run ]]; then {outcome}; fi\n"
        self.write(self.folder / "coarse" / ".venv" / "bin" / "python", STAND_IN + run)

    def start(self, **variables):
        script = self.script.read_text().replace("/var/tmp/coarse-campaign-reboots", f"{self.folder}/reboots")
        self.write(self.script, script)
        environment = {
            "PATH": f"{self.folder}/bin:{os.environ['PATH']}",
            "AWS": f"{self.folder}/bin/aws",
            "TOLD": str(self.told),
            "BUCKET": str(self.bucket),
            "INSTANCE_TYPE": "g5.12xlarge",
            "DESTINATION": "s3://mine/stack",
            "FLAGS": "--steps 7 --model resnet50",
            "NUM_INSTANCES": "1",
            "NODE_RANK": "0",
            "MAX_HOURS": "2",
            "COARSE_COMMIT": "abc",
        }
        subprocess.run([self.script], env=environment | variables, timeout=60, capture_output=True, text=True)
        return self.told.read_text().splitlines()


@pytest.fixture
def instance(tmp_path):
    return Instance(tmp_path)


def test_an_instance_trains_copies_its_results_and_goes(instance):
    told = instance.start()
    assert told[0] == "shutdown -h +120"
    assert "setup.sh --horovod" in told
    assert (
        "python -m experiments.aws.run --instance g5.12xlarge --results runs/aws --steps 7 --model resnet50"
        in told
    )
    assert told[-1] == "shutdown -h now"
    assert (instance.bucket / "runs.jsonl").read_text() == "result\n"
    assert (instance.bucket / "exit-code-0").read_text() == "0\n"


def test_a_campaign_that_fails_still_copies_what_there_is_and_goes(instance):
    instance.train("echo broken; exit 4")
    assert instance.start()[-1] == "shutdown -h now"
    assert (instance.bucket / "output-0.txt").read_text() == "broken\n"
    assert (instance.bucket / "exit-code-0").read_text() == "4\n"


def test_a_new_driver_causes_one_reboot(instance):
    instance.set_up("exit 3")
    assert instance.start()[-1] == "reboot "
    assert instance.start()[-1] == "shutdown -h now"
    assert (instance.bucket / "exit-code-0").read_text() == "1\n"


def test_two_instances_meet_by_way_of_the_bucket(instance):
    (instance.bucket / "address-0").write_text("10.0.0.7\n")
    told = instance.start(NUM_INSTANCES="2", NODE_RANK="1")
    assert any(
        line.endswith("--nnodes 2 --node-rank 1 --master-addr 10.0.0.7 --steps 7 --model resnet50")
        for line in told
    )
    assert (instance.bucket / "address-1").read_text().strip()
