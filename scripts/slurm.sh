#!/usr/bin/env bash
#SBATCH --job-name=train_moe
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@300
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
# Trains under Slurm, one task for each GPU. Submitted from the top of the tree; what sbatch takes goes in front:
#
#     sbatch --nodes=2 --time=8:00:00 scripts/slurm.sh --config configs/moonlight_16b.json --set train.lr=3e-4
#
# Five minutes before the end Slurm signals this script: the run saves, ends with 3, and the job is queued again, where
# the same command goes on. A run that fails is started again in the job (scripts/restart.sh says when that ends). To
# end one for good, scancel it.
#
#     LAUNCHER=mpirun|srun     default: srun where it speaks PMIx, else mpirun
set -u
cd "${SLURM_SUBMIT_DIR:?is not set: submit it with sbatch}"
[ -x ./train_moe ] || {
    printf 'error: no ./train_moe in %s\nhint:  submit from the top of the tree, after make\n' "$PWD" >&2
    exit 2
}
run_dir=$(./train_moe --print-config "$@" | sed -n '/^  "run": {/,/^  }/ s/^    "dir": "\(.*\)",*$/\1/p')
[ -n "$run_dir" ] || exit 2 # it has said why

LAUNCHER=${LAUNCHER:-$(srun --mpi=list 2>&1 | grep -q pmix && echo srun || echo mpirun)}
cores=${SLURM_CPUS_PER_TASK:-1}
case $LAUNCHER in
srun) launch=(srun --mpi=pmix --kill-on-bad-exit=1 --cpu-bind=cores --cpus-per-task="$cores") ;;
mpirun) launch=(mpirun -q --map-by "slot:PE=$cores" --bind-to core) ;;
*)
    printf 'error: LAUNCHER is %s\nhint:  LAUNCHER=mpirun or LAUNCHER=srun\n' "$LAUNCHER" >&2
    exit 2
    ;;
esac

scripts/restart.sh "$run_dir" "${launch[@]}" ./train_moe "$@" &
loop=$!
trap 'kill -USR1 $loop' USR1 TERM
while true; do
    wait $loop
    code=$?
    kill -0 $loop 2>/dev/null || break
done
[ $code = 3 ] && scontrol requeue "$SLURM_JOB_ID"
exit $code
