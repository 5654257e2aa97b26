"""Files for clusters: their manifests have the fields that the schemas allow, and start the examples that exist."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
CLUSTERS = ROOT / "examples" / "clusters"
KUBEFLOW = "kubeflow-training"

# Of MPIJob v2beta1, which no package on PyPI describes: the API's fields (True: required).
MPI_JOB = {"slotsPerWorker": False, "runPolicy": False, "mpiReplicaSpecs": True, "sshAuthMountPath": False}
MPI_JOB |= {"mpiImplementation": False, "launcherCreationPolicy": False, "runLauncherAsWorker": False}
RUN_POLICY = {"cleanPodPolicy", "ttlSecondsAfterFinished", "activeDeadlineSeconds", "backoffLimit"}
RUN_POLICY |= {"schedulingPolicy", "suspend", "managedBy"}
REPLICA = {"replicas", "restartPolicy", "template"}


def manifests(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((CLUSTERS / name).read_text()))


def manifest(name: str) -> dict[str, Any]:
    (found,) = manifests(name)
    return found


def check_by_schema(resource: dict[str, Any]) -> None:
    """Strictly: a field that the schema does not have is an error."""
    validation = pytest.importorskip("kubernetes_validate")
    validation.validate(resource, validation.latest_version(), strict=True)


def check_pod(template: dict[str, Any]) -> None:
    check_by_schema({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, **template})


def test_the_job_of_kubernetes_fits_its_schemas() -> None:
    resources = manifests("kubernetes-job.yaml")
    assert [each["kind"] for each in resources] == ["Service", "PersistentVolumeClaim", "Job"]
    for resource in resources:
        check_by_schema(resource)


def test_the_service_gives_its_pods_the_name_that_workers_connect_to() -> None:
    service, claim, job = manifests("kubernetes-job.yaml")
    pod = job["spec"]["template"]["spec"]
    assert pod["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": job["metadata"]["name"]}
    (command,) = pod["containers"][0]["args"]
    assert f"--master-addr {job['metadata']['name']}-0.{service['metadata']['name']} " in command
    assert f"--nnodes {job['spec']['completions']} " in command
    assert pod["volumes"][0]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]


def test_a_field_that_kubernetes_does_not_have_is_found() -> None:
    _, _, job = manifests("kubernetes-job.yaml")
    job["spec"]["completion"] = 2
    with pytest.raises(Exception, match="completion"):
        check_by_schema(job)


def as_model(module: Any, kind: str, value: Any) -> Any:
    """`value` as a type of the operator's SDK, whose constructors check it.

    Args:
        module: The SDK's models.
        kind: Of the value, as the SDK names it.
        value: Of YAML.
    """
    if found := re.fullmatch(r"dict\(str, (\w+)\)", kind):
        return {name: as_model(module, found[1], each) for name, each in value.items()}
    if kind in ("str", "int", "bool"):
        assert type(value).__name__ == kind, (kind, value)
        return value
    model = getattr(module, kind, None)
    if model is None:  # a type of Kubernetes itself
        return value
    names = {json_name: name for name, json_name in model.attribute_map.items()}
    assert value.keys() <= names.keys(), f"{kind} has no {value.keys() - names.keys()}"
    return model(
        **{names[each]: as_model(module, model.openapi_types[names[each]], value[each]) for each in value}
    )


def test_the_pytorchjob_fits_the_types_of_its_operator() -> None:
    module = pytest.importorskip("kubeflow.training.models", reason=f"pip install {KUBEFLOW}")
    job = manifest("kubeflow-pytorchjob.yaml")
    assert job["apiVersion"] == "kubeflow.org/v1"
    as_model(module, "KubeflowOrgV1PyTorchJob", job)
    replicas = job["spec"]["pytorchReplicaSpecs"]
    assert replicas.keys() == {"Master", "Worker"}
    for replica in replicas.values():
        check_pod(replica["template"])
        assert replica["template"]["spec"]["containers"][0]["name"] == "pytorch"  # the operator looks for it
    del job["spec"]["pytorchReplicaSpecs"]
    with pytest.raises(ValueError, match="must not be `None`"):
        as_model(module, "KubeflowOrgV1PyTorchJob", job)


def test_the_mpijob_has_the_fields_of_its_operator() -> None:
    job = manifest("kubeflow-mpijob.yaml")
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v2beta1", "MPIJob")
    spec = job["spec"]
    assert spec.keys() <= MPI_JOB.keys()
    assert {name for name, is_required in MPI_JOB.items() if is_required} <= spec.keys()
    assert spec["runPolicy"].keys() <= RUN_POLICY
    assert spec["runPolicy"]["cleanPodPolicy"] in ("None", "Running", "All")
    assert spec["mpiReplicaSpecs"].keys() == {"Launcher", "Worker"}
    for replica in spec["mpiReplicaSpecs"].values():
        assert replica.keys() <= REPLICA
        assert replica["restartPolicy"] in ("Never", "OnFailure")
        check_pod(replica["template"])
    (command,) = spec["mpiReplicaSpecs"]["Launcher"]["template"]["spec"]["containers"][0]["args"]
    assert f"-n {spec['slotsPerWorker'] * spec['mpiReplicaSpecs']['Worker']['replicas']} " in command


def test_the_job_of_skypilot_fits_its_schema() -> None:
    schemas = pytest.importorskip("sky.utils.schemas", reason="pip install skypilot")
    validation = pytest.importorskip("sky.utils.validator")
    task = manifest("skypilot.yaml")
    validator = validation.get_schema_validator()
    resources = task.pop("resources")
    validator(schemas.get_task_schema()).validate(task)
    validator(schemas.get_resources_schema()).validate(resources)


def shell_programs() -> Iterator[tuple[str, str]]:
    yield "slurm.sh", (CLUSTERS / "slurm.sh").read_text()
    task = manifest("skypilot.yaml")
    for part in ("setup", "run"):
        yield f"skypilot.yaml: {part}", f"#!/bin/bash\n{task[part]}"
    for name in ("kubernetes-job.yaml", "kubeflow-mpijob.yaml"):
        for container in containers(name):
            if container.get("command") == ["sh", "-c"]:
                yield name, f"#!/bin/sh\n{container['args'][0]}\n"


def containers(name: str) -> Iterator[dict[str, Any]]:
    """Of all pods that a file describes."""

    def found(value: Any) -> Iterator[dict[str, Any]]:
        if isinstance(value, dict):
            yield from value.get("containers", ())
            for each in value.values():
                yield from found(each)

    for resource in manifests(name):
        yield from found(resource)


@pytest.mark.parametrize(("name", "text"), list(shell_programs()))
def test_shell_is_sound(name: str, text: str) -> None:
    program = Path(sys.executable).with_name("shellcheck")
    done = subprocess.run([program, "-"], input=text, capture_output=True, text=True)
    assert done.returncode == 0, f"{name}: {done.stdout}"


def test_all_start_an_example_that_exists() -> None:
    for path in CLUSTERS.iterdir():
        for script in re.findall(r"examples/[\w/]+\.py", path.read_text()):
            assert (ROOT / script).is_file(), f"{path.name}: {script}"
