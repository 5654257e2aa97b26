#!/usr/bin/env bash
# Runs a campaign on an instance that campaign.yaml has started: sets it up, trains, copies the results to the bucket, turns
# the instance off, which terminates it. Its service starts it again after a reboot.
#
# The template writes the variables below to /etc/coarse-campaign:
#   INSTANCE_TYPE     as in experiments.aws.run --instance
#   DESTINATION       s3://BUCKET/FOLDER of the results
#   FLAGS             more flags of experiments.aws.run; may be empty
#   NUM_INSTANCES     instances that train together
#   NODE_RANK         which of them this is, from 0
#   MAX_HOURS         the instance is turned off after that, whatever has happened
#   COARSE_COMMIT     commit for the results
set -euo pipefail
cd "$(dirname "$0")/../.."

aws=${AWS:-/opt/awscli/bin/aws}
reboots=/var/tmp/coarse-campaign-reboots
results=runs/aws
export COARSE_COMMIT

# Whatever ends the script, its results are copied and the instance goes.
finish() {
    local status=$?
    trap - EXIT
    mkdir -p "$results"
    echo "$status" >"$results/exit-code-$NODE_RANK"
    "$aws" s3 cp --recursive --only-show-errors "$results" "$DESTINATION" || true
    shutdown -h now
}

note_versions() {
    mkdir -p "$results"
    .venv/bin/python -m pip freeze >"$results/python-packages-$NODE_RANK.txt"
    dpkg-query --show >"$results/ubuntu-packages-$NODE_RANK.txt"
    nvidia-smi topo -m >"$results/topology-$NODE_RANK.txt" 2>&1 || true
}

# setup.sh asks for a reboot after it has installed a driver.
set_up() {
    local status=0 flags=(--horovod)
    if [[ $INSTANCE_TYPE = cpu ]]; then flags+=(--cpu); fi
    experiments/aws/setup.sh "${flags[@]}" || status=$?
    if [[ $status != 3 ]]; then return "$status"; fi
    if [[ -e $reboots ]]; then
        echo "campaign.sh: the driver does not work after a reboot" >&2
        return 1
    fi
    touch "$reboots"
    trap - EXIT
    reboot
    exit 0
}

# No instance starts to train before all are set up, because workers wait for each other only some minutes. Each puts its
# address into the bucket; prints that of the first one.
meet() {
    hostname -I | cut -d' ' -f1 | "$aws" s3 cp --quiet - "$DESTINATION/address-$NODE_RANK"
    for ((rank = 0; rank < NUM_INSTANCES; rank++)); do
        until "$aws" s3 ls "$DESTINATION/address-$rank" >/dev/null; do sleep 10; done
    done
    "$aws" s3 cp --quiet "$DESTINATION/address-0" -
}

train() {
    local nodes=() first
    if ((NUM_INSTANCES > 1)); then
        first=$(meet)
        nodes=(--nnodes "$NUM_INSTANCES" --node-rank "$NODE_RANK" --master-addr "$first")
    fi
    # shellcheck disable=SC2086,SC2153 # several flags, of the template
    .venv/bin/python -m experiments.aws.run --instance "$INSTANCE_TYPE" --results "$results" "${nodes[@]}" $FLAGS
}

trap finish EXIT
shutdown -h "+$((60 * MAX_HOURS))"
set_up
note_versions
train 2>&1 | tee "$results/output-$NODE_RANK.txt"
