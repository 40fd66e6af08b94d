"""A real Slurm of four nodes on this machine, from the distribution's packages, for the tests of this folder.

Every node, and the one that controls them, is a set of namespaces: its own host name, network, processes and /dev/shm;
the file system is shared, as by NFS on a cluster. Nothing outside is touched, and all of it ends with the process that
started it: the first process of each namespace waits for a line that never comes.

    node[1-4]     16 CPUs and 8 pretended GPUs each (links to /dev/null: no device is there)
    partitions    main (all nodes), old (node1, node2), new (node3, node4), urgent (all, and takes them from others)
"""

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

NODES = ("node1", "node2", "node3", "node4")
CONTROL = "ctl"
ADDRESSES = {CONTROL: "10.77.0.1"} | {node: f"10.77.0.{11 + number}" for number, node in enumerate(NODES)}
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "unshare", "nsenter", "ip", "bash")
PATH = f"{os.environ['PATH']}:/usr/sbin:/sbin"
# Everyone binds to the address of his host name; het jobs are started by the backfill scheduler alone, so it runs every
# second; a credential's life is also how long a job that was queued again must wait; a lost node is missed in 15 s.
SLURM_CONF = """\
ClusterName=tests
SlurmctldHost=ctl(10.77.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={root}/munge.socket,cred_expire=5
CredType=cred/munge
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool.%n
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/slurmd.%n.pid
SlurmctldLogFile={root}/slurmctld.log
SlurmdLogFile={root}/slurmd.%n.log
MailProg=/bin/true
MpiDefault=none
SwitchType=switch/none
ProctrackType=proctrack/linuxproc
TaskPlugin={task_plugin}
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,bf_hetjob_immediate,batch_sched_delay=0,sched_interval=5
SlurmdParameters=config_overrides
JobRequeue=1
ReturnToService=2
MinJobAge=3600
KillWait=30
BatchStartTimeout=30
SlurmctldTimeout=30
SlurmdTimeout=15
GresTypes=gpu
PartitionName=main Nodes=ALL Default=YES DefaultTime=60 MaxTime=INFINITE State=UP
PartitionName=old Nodes=node[1-2] DefaultTime=60 MaxTime=INFINITE State=UP
PartitionName=new Nodes=node[3-4] DefaultTime=60 MaxTime=INFINITE State=UP
PartitionName=urgent Nodes=ALL DefaultTime=60 MaxTime=INFINITE State=UP PriorityTier=2
"""
# Slurm 22.05 cannot do without a cgroup plugin; with an empty mount point this one does nothing.
CGROUP_CONF = "CgroupPlugin=cgroup/v1\nCgroupAutomount=no\nCgroupMountpoint={root}/nocgroup\n"
FIRST_PROCESS = """
hostname "$1" && mount --bind "$2" /etc/hosts && mount -t tmpfs -o mode=1777 tmpfs /dev/shm && ip link set lo up &&
echo open && read -r _
"""


def why_not() -> str | None:
    """Why no cluster can be started here; None where one can."""
    if missing := [name for name in PROGRAMS if shutil.which(name, path=PATH) is None]:
        return f"needs {', '.join(missing)} (Debian: slurmctld, slurmd, slurm-client, munge, iproute2)"
    allowed = ["unshare", "--net", "--uts", "--mount", "--pid", "--fork", "ip", "link", "add", "b0", "type", "bridge"]
    if os.geteuid() or subprocess.run(allowed, capture_output=True, env={"PATH": PATH}).returncode:
        return "needs the right to make network namespaces (root)"
    return None


class Cluster:
    """The cluster as long as it is a context. `root` holds its settings and the daemons' logs."""

    def __init__(self, cpus: int = 16, task_plugin: str = "task/none") -> None:
        """`cpus` of each node; more than this machine has only where no plug-in binds anything to them."""
        self.root = Path(tempfile.mkdtemp(prefix="slurm-"))
        self.root.chmod(0o755)  # munged wants a socket that everybody reaches
        self._doors: dict[str, subprocess.Popen] = {}
        self._first: dict[str, int] = {}
        for name in ("state", "nocgroup", *(f"spool.{node}" for node in NODES)):
            (self.root / name).mkdir()
        for number in range(8):
            (self.root / f"gpu{number}").symlink_to("/dev/null")
        nodes = (f"NodeName={n} NodeAddr={ADDRESSES[n]} CPUs={cpus} RealMemory=200000 Gres=gpu:8" for n in NODES)
        conf = {
            "slurm.conf": "\n".join([SLURM_CONF.format(root=self.root, task_plugin=task_plugin), *nodes, ""]),
            "gres.conf": f"AutoDetect=off\nNodeName=node[1-4] Name=gpu File={self.root}/gpu[0-7]\n",
            "cgroup.conf": CGROUP_CONF.format(root=self.root),
            "hosts": "\n".join(["127.0.0.1 localhost", *(f"{a} {name}" for name, a in ADDRESSES.items()), ""]),
        }
        for name, text in conf.items():
            (self.root / name).write_text(text)
        (self.root / "munge.key").write_bytes(os.urandom(128))
        (self.root / "munge.key").chmod(0o600)

    def __enter__(self) -> "Cluster":
        self._open(CONTROL)
        for words in ("link add br0 type bridge", f"addr add {ADDRESSES[CONTROL]}/24 dev br0", "link set br0 up"):
            self.on(CONTROL, "ip", *words.split())
        files = {
            "key-file": "munge.key",
            "socket": "munge.socket",
            "pid-file": "munged.pid",
            "seed-file": "munged.seed",
        }
        files["log-file"] = "munged.log"
        self.on(CONTROL, "munged", *(f"--{option}={self.root}/{file}" for option, file in files.items()))
        self.on(CONTROL, "slurmctld", "-c")
        for node in NODES:
            self.power_on(node)
        self.wait_for_idle_nodes()
        return self

    def __exit__(self, *_: object) -> None:
        for name in reversed(list(self._doors)):
            self.power_off(name)
        shutil.rmtree(self.root, ignore_errors=True)

    def on(self, name: str, *command: str, check: bool = True, **environment: str) -> subprocess.CompletedProcess:
        """Runs a command on a machine of the cluster, to its end."""
        return self._run(name, "mnup", *command, check=check, **environment)

    def power_on(self, node: str) -> None:
        """Starts a node that is off."""
        self._open(node)
        wire, inside = f"v-{node}", str(self._first[node])
        # seen from outside: within its own processes the controlling machine has no number for those of a node
        self._run(CONTROL, "n", "ip", *f"link add {wire} type veth peer name eth0 netns {inside}".split())
        self._run(CONTROL, "n", "ip", *f"link set {wire} master br0 up".split())
        self.on(node, "ip", *f"addr add {ADDRESSES[node]}/24 dev eth0".split())
        self.on(node, "ip", "link", "set", "eth0", "up")
        self.on(node, "slurmd", "-N", node)

    def power_off(self, node: str) -> None:
        """Every process of a node dies at once, and its network with it."""
        os.kill(self._first.pop(node), signal.SIGKILL)
        self._doors.pop(node).wait()

    def controller_off(self) -> None:
        """Slurm's controller ends, as for a restart; nodes and jobs go on."""
        number = (self.root / "slurmctld.pid").read_text().strip()
        self.on(CONTROL, "kill", number)
        self.wait(lambda: self.on(CONTROL, "kill", "-0", number, check=False).returncode != 0, "the controller's end")

    def controller_on(self) -> None:
        """And begins again with what it knew."""
        self.on(CONTROL, "slurmctld")
        self.wait(lambda: bool(self.states()), "the controller")

    def link(self, node: str, state: str) -> None:
        """Pulls a node's cable (`down`) or puts it back (`up`); its processes live on."""
        self._run(CONTROL, "n", "ip", "link", "set", f"v-{node}", state)

    def _open(self, name: str) -> None:
        """Makes the namespaces of a machine; bash is its first process, which collects what others leave behind."""
        flags = ["--net", "--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        command = ["unshare", *flags, "bash", "-c", FIRST_PROCESS, "first", name, f"{self.root}/hosts"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        door = self._doors[name] = subprocess.Popen(command, env={"PATH": PATH}, **pipes)
        assert door.stdout.readline() == "open\n", f"{name} has no namespaces"
        self._first[name] = int(Path(f"/proc/{door.pid}/task/{door.pid}/children").read_text())

    def _run(
        self, name: str, spaces: str, *command: str, check: bool = True, **environment: str
    ) -> subprocess.CompletedProcess:
        """`spaces` are nsenter's letters of the namespaces to be in."""
        where = ["nsenter", "-t", str(self._first[name]), *(f"-{space}" for space in spaces), f"--wd={Path.cwd()}"]
        variables = {"PATH": PATH, "SLURM_CONF": f"{self.root}/slurm.conf"} | environment
        pipes = {"capture_output": True, "text": True, "stdin": subprocess.DEVNULL}
        done = subprocess.run([*where, *command], env=variables, **pipes)
        assert done.returncode == 0 or not check, (command, done.stdout, done.stderr)
        return done

    def states(self) -> list[str]:
        """The state of every node, in Slurm's words."""
        return self.on(CONTROL, "sinfo", "-h", "-N", "-p", "main", "-o", "%T", check=False).stdout.split()

    def wait_for_idle_nodes(self) -> None:
        """Until every node is there and has no job."""
        self.wait(lambda: self.states() == ["idle"] * len(NODES), "all nodes to be idle")

    def job(self, number: str) -> dict[str, str]:
        """The fields of `scontrol show job`: JobState, Restarts, NodeList, ..."""
        text = self.on(CONTROL, "scontrol", "-o", "show", "job", number).stdout.splitlines()[0]
        return dict(word.split("=", 1) for word in text.split() if "=" in word)

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        """Until the condition holds; a crowded machine takes its time, so only a hang ends it."""
        deadline = time.monotonic() + 1500
        while not condition():
            assert time.monotonic() < deadline, f"waited in vain for {what}"
            time.sleep(0.2)
