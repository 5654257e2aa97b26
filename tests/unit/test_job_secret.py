"""JobSecret: values that no worker of this job set for this key are refused."""

from __future__ import annotations

import pytest

from coarse.env import job_secret
from coarse.errors import RendezvousError
from coarse.security.job_secret import JobSecret

OURS, THEIRS, NONE = JobSecret(b"o" * 32), JobSecret(b"t" * 32), JobSecret()


@pytest.mark.parametrize("secret", [OURS, NONE])
@pytest.mark.parametrize("value", [b"", b"\0", b"{}", b"x" * 1000])
def test_what_was_sealed_is_there_again(secret, value):
    assert secret.open("key", secret.seal("key", value)) == value


@pytest.mark.parametrize(
    "written",
    [
        b"",
        b'{"directory": "/tmp/theirs"}',
        THEIRS.seal("devices/0", b"{}"),
        OURS.seal("devices/1", b"{}"),
        OURS.seal("devices/0", b"{}") + b" ",
        OURS.seal("devices/0", b"{}")[:20],
    ],
    ids=["nothing", "no proof", "another secret", "another key", "more", "less"],
)
def test_what_a_stranger_has_written_is_refused_by_name(written):
    with pytest.raises(
        RendezvousError, match=r"refused 'devices/0'.*COARSE_JOB_SECRET. Either a process outside"
    ):
        OURS.open("devices/0", written)


def test_a_worker_without_the_secret_hears_that_others_have_one():
    with pytest.raises(RendezvousError, match="Start all workers of the job with the same one"):
        NONE.open("devices/0", OURS.seal("devices/0", b"{}"))


def test_proofs_are_of_one_purpose_and_of_what_was_said_as_it_was_parted():
    proof = OURS.prove(b"a", b"bc", b"d")
    assert OURS.is_proof(proof, b"a", b"bc", b"d")
    for other in ((b"b", b"bc", b"d"), (b"a", b"b", b"cd"), (b"a", b"bcd")):
        assert not OURS.is_proof(proof, *other)


def test_a_secret_is_never_shown():
    assert "o" * 32 not in f"{OURS} {OURS!r}"


def test_the_environment_gives_it_unless_it_can_be_guessed():
    assert job_secret({"COARSE_JOB_SECRET": "s" * 16}) == JobSecret(b"s" * 16)
    assert job_secret({}) == JobSecret()
    with pytest.raises(RendezvousError, match="has 15 characters, too few to be safe"):
        job_secret({"COARSE_JOB_SECRET": "s" * 15})
