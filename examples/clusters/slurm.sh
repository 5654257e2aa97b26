#!/bin/bash
# A worker per task. Slurm's preemption and time limit save a checkpoint first.
#
#     sbatch examples/clusters/slurm.sh examples/preemptible_digits.py --checkpoints /shared/checkpoints
#
#SBATCH --job-name=coarse
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=2
#SBATCH --cpus-per-task=1
#SBATCH --time=01:00:00
#SBATCH --signal=USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append
export OMP_NUM_THREADS="${SLURM_CPUS_PER_TASK:-1}"
exec srun --kill-on-bad-exit=1 python "$@"
