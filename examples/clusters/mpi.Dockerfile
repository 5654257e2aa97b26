# The image for training with Open MPI and a server of SSH without root, by which Kubeflow's MPI operator starts workers:
#
#     docker build -f docker/Dockerfile --target training -t coarse-training .
#     docker build -f examples/clusters/mpi.Dockerfile -t coarse-mpi examples/clusters
FROM coarse-training
# hadolint ignore=DL3066
USER root
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends openmpi-bin openssh-client openssh-server \
    && rm -rf /var/lib/apt/lists/*
# The operator mounts the keys; port 2222 needs no root.
RUN mkdir -p /run/sshd \
    && printf '%s\n' 'Port 2222' 'HostKey /home/trainer/.ssh/id_rsa' 'AuthorizedKeysFile .ssh/authorized_keys' \
        'PidFile none' 'StrictModes no' 'UsePAM no' > /home/trainer/sshd_config \
    && printf '%s\n' 'Host *' '    Port 2222' '    StrictHostKeyChecking no' '    UserKnownHostsFile /dev/null' \
        '    LogLevel ERROR' > /etc/ssh/ssh_config.d/mpi.conf
USER trainer
