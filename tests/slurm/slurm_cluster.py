"""A real Slurm of four virtual nodes on this machine: slurmctld, one slurmd per node, munge. Root only."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

NODES = ("n1", "n2", "n3", "n4")
DAEMONS = ("slurmctld", "slurmd", "munged", "sbatch", "srun", "scontrol", "squeue", "sinfo")
SETTINGS = """ClusterName=headway
SlurmctldHost=localhost
SlurmctldPort={controller}
AuthType=auth/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
SlurmdParameters=config_overrides
SlurmdTimeout=5
KillWait=2
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
SchedulerParameters=bf_interval=2,sched_interval=2
NodeName=n[1-4] NodeHostname=localhost NodeAddr=127.0.0.1 Port=[{nodes}] CPUs=2 State=UNKNOWN
PartitionName=debug Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO
"""


def why_not() -> str | None:
    """Say why no Slurm can be started here; None: it can."""
    missing = [name for name in DAEMONS if shutil.which(name) is None]
    if missing:
        return f"{', '.join(missing)} not installed: apt-get install slurm-wlm munge"
    return None if os.geteuid() == 0 else "needs root"


@dataclass(slots=True)
class SlurmCluster:
    """A running cluster in a folder."""

    folder: Path
    environment: dict[str, str] = field(default_factory=dict)

    def call(self, *words: str, check: bool = True) -> str:
        """Run a Slurm command and return what it says."""
        done = subprocess.run(
            words, capture_output=True, text=True, timeout=30, check=False, env=self.environment, cwd=self.folder
        )
        assert not check or done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def submit(self, script: Path, *options: str) -> str:
        """Submit a batch file; return the job's id."""
        return self.call("sbatch", "--parsable", *options, str(script)).split(";")[0]

    def state(self, job: str) -> str:
        """The job's state, such as RUNNING or COMPLETED."""
        return self.job(job)["JobState"]

    def job(self, job: str) -> dict[str, str]:
        """What scontrol says of a job."""
        told = self.call("scontrol", "--oneliner", "show", "job", job)
        return dict(pair.partition("=")[::2] for pair in told.split() if "=" in pair)

    def nodes(self) -> dict[str, str]:
        """The state of each node, such as idle, alloc or down*."""
        return dict(line.split() for line in self.call("sinfo", "--noheader", "-N", "-o", "%N %t").splitlines())

    def start_node(self, node: str) -> None:
        """Start the slurmd of a node."""
        self.call("slurmd", "-f", self.environment["SLURM_CONF"], "-N", node)

    def kill_node(self, node: str) -> int:
        """Kill a node as a power failure does: its slurmd, the stepds and the tasks. Return how many processes."""
        pids = [*_processes_of(node, f"SLURM_CONF={self.environment['SLURM_CONF']}")]
        pids += [int((self.folder / f"slurmd.{node}.pid").read_text())]
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return len(pids)

    def stop(self) -> None:
        """End every daemon and every task, those of killed nodes too."""
        self.call("scancel", "--user=root", check=False)
        self.call("scontrol", "shutdown", check=False)
        with contextlib.suppress(AssertionError):
            wait_until(lambda: not any(self._processes()), 5, "the daemons to end")
        for pid in self._processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _processes(self) -> Iterator[int]:
        """All processes that this cluster started: its configuration is in their environment."""
        return _processes_with(f"SLURM_CONF={self.environment['SLURM_CONF']}")


def wait_until(
    condition: Callable[[], bool], seconds: float, what: str, told: Callable[[], object] = lambda: ""
) -> None:
    """Wait for a condition; where it does not come, say for what, and what ``told`` returns."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds:g} s in vain for {what}\n{told()}"
        time.sleep(0.2)


@contextlib.contextmanager
def slurm_cluster(folder: Path) -> Iterator[SlurmCluster]:
    """Start munge where it does not run, the controller and four nodes; stop all of it in the end."""
    with munge():
        settings = folder / "slurm.conf"
        for name in ("state", *(f"spool.{node}" for node in NODES)):
            (folder / name).mkdir()
        first = _free_ports(len(NODES) + 1)
        settings.write_text(SETTINGS.format(folder=folder, controller=first, nodes=f"{first + 1}-{first + len(NODES)}"))
        cluster = SlurmCluster(folder, dict(os.environ) | {"SLURM_CONF": str(settings)})
        try:
            cluster.call("slurmctld", "-f", str(settings))
            for node in NODES:
                cluster.start_node(node)
            wait_until(lambda: set(cluster.nodes().values()) == {"idle"}, 30, "four idle nodes")
            yield cluster
        finally:
            cluster.stop()


@contextlib.contextmanager
def munge() -> Iterator[None]:
    """Have munge answer, and end it only if it was started here."""
    if _munge_answers():
        yield
        return
    runtime = Path("/run/munge")
    runtime.mkdir(exist_ok=True)
    shutil.chown(runtime, "munge")
    subprocess.run(["su", "-s", "/bin/sh", "munge", "-c", "/usr/sbin/munged"], check=True, timeout=10)
    try:
        wait_until(_munge_answers, 10, "munge")
        yield
    finally:
        with contextlib.suppress(OSError, ValueError):
            os.kill(int((runtime / "munged.pid").read_text()), signal.SIGTERM)


def _munge_answers() -> bool:
    made = subprocess.run(["munge", "-n"], capture_output=True, timeout=10, check=False)
    return made.returncode == 0 and subprocess.run(["unmunge"], input=made.stdout, capture_output=True).returncode == 0


def _free_ports(count: int) -> int:
    """The first of some consecutive ports below the ephemeral ones that nobody listens on."""
    for first in range(17000 + os.getpid() % 1000, 20000, count):
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for port in range(first, first + count):
                stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return first
    raise AssertionError("no free ports")


def _processes_of(node: str, settings: str) -> Iterator[int]:
    """The tasks of a virtual node of one cluster, and the slurmstepd above each."""
    for pid in _processes_with(f"SLURMD_NODENAME={node}", settings):
        with contextlib.suppress(OSError):
            yield pid
            parent = int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
            if "slurmstepd" in Path(f"/proc/{parent}/comm").read_text():
                yield parent


def _processes_with(*variables: str) -> Iterator[int]:
    wanted = {variable.encode() for variable in variables}
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if folder.name.isdigit() and wanted <= set((folder / "environ").read_bytes().split(b"\0")):
                yield int(folder.name)
