"""Lesson 12 from Python: a sweep over learning rates as a job array, with submitit.

    python lessons/12-elastic/sweep.py --lr 0.01 0.05 0.1

Each learning rate is a task of one array: one node with two ranks, under torchrun. Near its
time limit a task saves, goes back into the queue, and goes on later, as the job of
slurm/PT_CNN_Elastic.slurm does. Without Slurm, submitit runs the tasks on this machine.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

try:
    import submitit
except ModuleNotFoundError:
    sys.exit(
        "error: submitit is not installed: run `pip install submitit`, or submit an array "
        "with sbatch, as the page of lesson 12 says."
    )

from multigpu.errors import UserError, report_user_errors

ROOT = Path(__file__).resolve().parents[2]


class Training:
    """One run of lesson 12's script. submitit calls it in each start of its task."""

    def __init__(self, out: Path, options: list[str], ranks: int):
        self.out = out
        self.options = options
        self.ranks = ranks
        self.process: subprocess.Popen | None = None

    def __call__(self) -> dict:
        """Train from the newest checkpoint to the end; return what metrics.json says.

        Raises RuntimeError if torchrun fails.
        """
        # Slurm sends a signal to all processes of a step. torchrun ignores these two, as in
        # slurm/PT_CNN_Elastic.slurm, and waits until the ranks have saved.
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        torchrun += ["--local-addr=127.0.0.1", f"--nproc-per-node={self.ranks}"]
        torchrun += ["--max-restarts=3", "--signals-to-handle=SIGINT"]
        script = [ROOT / "scripts/PT_CNN_Elastic.py", "--end-on-term", "--out", self.out]
        self.process = subprocess.Popen(
            ["bash", "-c", 'trap "" USR2 TERM; exec "$@"', "bash"]
            + [str(word) for word in (*torchrun, *script, *self.options)],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        while self.process.poll() is None:
            time.sleep(0.2)
        if self.process.returncode:
            raise RuntimeError(f"torchrun ended with {self.process.returncode}")
        if not (self.out / "metrics.json").exists():
            # Slurm has sent SIGTERM, the ranks have saved, and it requeues the job itself.
            # Without a result, submitit goes on waiting for the next start.
            sys.exit(1)
        return json.loads((self.out / "metrics.json").read_text())

    def checkpoint(self) -> submitit.helpers.DelayedSubmission:
        """End the ranks, which save; return what the task does when it starts again.

        submitit calls it after its signal, SIGUSR2, and then runs `scontrol requeue`.
        """
        deadline = time.monotonic() + 40
        while self.process and self.process.poll() is None and time.monotonic() < deadline:
            # The ranks are the children of torchrun. A rank that just starts has no handler
            # yet, so the signal is sent again.
            command = ["pkill", "--signal=USR1", "--parent", str(self.process.pid)]
            subprocess.run(command, check=False)
            time.sleep(1)
        return submitit.helpers.DelayedSubmission(Training(self.out, self.options, self.ranks))


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train lesson 12's CNN with several learning rates, each as a task of a "
        "Slurm array.",
        epilog="Options that it does not know go to scripts/PT_CNN_Elastic.py.",
    )
    rates = [0.01, 0.05, 0.1]
    parser.add_argument("--lr", type=float, nargs="+", default=rates)
    parser.add_argument("--out", type=Path, default=Path("results/sweep"))
    parser.add_argument("--ranks", type=int, default=2, help="of each task")
    parser.add_argument("--minutes", type=int, default=15, help="time limit of each start")
    parser.add_argument("--partition", help="of Slurm")
    args, args.options = parser.parse_known_args(arguments)
    return args


def sweep(args: argparse.Namespace) -> None:
    # max_num_timeout: a task that never gets further must not run for ever.
    executor = submitit.AutoExecutor(args.out / "submitit", slurm_max_num_timeout=20)
    executor.update_parameters(
        name="sweep",
        nodes=1,
        tasks_per_node=1,
        gpus_per_node=args.ranks,
        cpus_per_task=args.ranks,
        mem_gb=8,
        timeout_min=args.minutes,
        slurm_signal_delay_s=60,  # as --signal=USR2@60
        slurm_array_parallelism=4,  # at most four tasks at a time
        **({"slurm_partition": args.partition} if args.partition else {}),
    )
    trainings = []
    for lr in args.lr:
        out = (args.out / f"lr-{lr:g}").resolve()
        trainings.append(Training(out, [f"--lr={lr}", *args.options], args.ranks))
    try:
        with executor.batch():  # one array, instead of a job for each
            jobs = [executor.submit(training) for training in trainings]
    except submitit.core.utils.FailedJobError as error:
        raise UserError(f"sbatch did not accept the array: {error}") from None
    print(f"submitted: {', '.join(job.job_id for job in jobs)}", flush=True)
    if executor.cluster == "slurm":
        wait_for_queue(jobs[0].job_id.partition("_")[0])
    print("     lr       accuracy  starts")
    for lr, job in zip(args.lr, jobs, strict=True):
        result = job.result()
        accuracy = result["accuracy"]
        print(f"{lr:7g}  {accuracy:13.4f}  {result['starts']:6}", flush=True)


def wait_for_queue(number: str) -> None:
    """Wait until a job, with all tasks of its array, has left Slurm's queue.

    submitit itself asks sacct, which needs an accounting database.
    """
    squeue = ["squeue", "--noheader", f"--jobs={number}"]
    while subprocess.run(squeue, capture_output=True, text=True).stdout.strip():
        time.sleep(2)


if __name__ == "__main__":
    report_user_errors()
    sweep(parse())
