"""launch/slurm.sbatch in real bash, with programs that stand in for Slurm's: what it says, and how it ends."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from repository import ROOT
from run_cases import CHARACTERS, agent_table, write_config

from hacpo_mega.config import load_config
from hacpo_mega.jobs import slurm_script
from hacpo_mega.jobs.slurm_script import prepare

pytestmark = pytest.mark.nightly

# Knows one job, which may be queued again, and whose controller is away the first $AWAY times; srun plays the ranks by
# $PLAY and notes what it was told.
SCONTROL = """#!/bin/bash
folder=$(dirname "$NOTES")
case "$*" in
  *hostnames*\\[1-2\\]) printf 'node1\\nnode2\\n' && exit ;;
  *hostnames*) echo "${*: -1}" | tr , '\\n' && exit ;;
esac
echo "$*" >>"$folder/asked"
if [[ "$*" == *${AWAY_FOR:-}* ]] && (($(grep -c "${AWAY_FOR:-}" "$folder/asked") <= ${AWAY:-0})); then
  echo "scontrol error: Unable to contact slurm controller (connect failure)" >&2 && exit 1
fi
case "$*" in
  *"show job"*) echo "JobId=7 JobState=${STATE:-RUNNING} ReqNodeList=(null) ExcNodeList=${EXCLUDED:-(null)} X=" ;;
  *"show node"*) echo "NodeName=node2 State=${NODE:-IDLE} SlurmdStartTime=2020-01-01T00:00:00 X=" ;;
esac
"""
# The job may do without $SPARE nodes.
SBATCH = """#!/bin/bash
excluded=$(sed -n 's/^#SBATCH --exclude=//p' | tail -n1 | tr , '\\n' | grep -c .)
((excluded <= ${SPARE:-9})) && [[ -z ${SLURM_HOSTFILE:-} ]] && exit
echo "allocation failure: Requested node configuration is not available" >&2
exit 1
"""
SLEEP = """#!/bin/bash
exec /bin/sleep 0.05
"""
SRUN = """#!/bin/bash
echo "$*" >>"$(dirname "$NOTES")/steps"
[[ "$*" == *rank.sh* || "$*" == *node.sh* ]] || exit 0
if [[ "$*" == *node.sh* ]]; then # what is to be done on a node is done here
  while [[ $1 != bash ]]; do shift; done
  exec "$@"
fi
while [[ $1 != */rank.sh ]]; do echo "$1" >>"$NOTES"; shift; done
echo "secret $HACPO_MEGA_SECRET export $SLURM_EXPORT_ENV" >>"$NOTES"
logs=$2 exec python3 -c "$PLAY"
"""
# Knows the containers that its files name.
ENROOT = """#!/bin/bash
cd "$(dirname "$0")/containers"
case "$1" in
  list) ls ;;
  remove) [[ $2 == -f ]] && rm "$3" && echo "enroot $*" >>../asked ;;
esac
"""
# Says which jobs of the user run.
SQUEUE = """#!/bin/bash
printf '7\\n8\\n'
"""
MANY = 32_768
ALL_ENDED = f"""
import os
logs = os.environ['logs']
for rank in range({MANY}):
    if rank != 20_000:
        with open(f'{{logs}}/rank_{{rank}}.ended', 'w') as file:
            print(rank, 2 if rank == 31_000 else 1, 10**18 - rank % 7, 'node1', file=file)
open(f'{{logs}}/rank_31000.log', 'w').write('the reason why\\n')
os._exit(2)
"""


class Attempt:
    """The script of a small run, run once, where Slurm has the given `variables`."""

    def __init__(
        self, folder: Path, play: str = "", num_ranks: int | None = None, variables: dict | None = None, **slurm
    ) -> None:
        agents = [agent_table(folder, name, "qwen3", CHARACTERS) for name in ("a", "b")]
        config = write_config(folder, agents, slurm={"gpus_per_node": 1, "preflight": False} | slurm)
        self.run_dir = folder / "run"
        text = prepare(load_config(config)).script(1)
        if num_ranks is not None:
            text = text.replace("num_ranks=2\n", f"num_ranks={num_ranks}\n")
        (self.run_dir / "slurm").mkdir(parents=True, exist_ok=True)
        (self.run_dir / "slurm" / "job.1.sbatch").write_text(text)
        programs = {
            "scontrol": SCONTROL,
            "srun": SRUN,
            "enroot": ENROOT,
            "squeue": SQUEUE,
            "sbatch": SBATCH,
            "sleep": SLEEP,
        }
        for name, content in programs.items():
            (folder / name).write_text(content)
            (folder / name).chmod(0o755)
        job = {
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NODELIST": "node[1-2]",
            "SLURM_JOB_NUM_NODES": "2",
            "PLAY": play,
            "NOTES": str(folder / "notes"),
        }
        environment = os.environ | job | {"PATH": f"{folder}:{os.environ['PATH']}"} | (variables or {})
        done = subprocess.run(["bash"], input=text, env=environment, capture_output=True, text=True, cwd=ROOT)
        self.status, self.said, self.script = done.returncode, done.stdout + done.stderr, text
        self.notes = (folder / "notes").read_text().splitlines() if (folder / "notes").exists() else []
        self.asked = (folder / "asked").read_text().splitlines() if (folder / "asked").exists() else []

    @property
    def ends(self) -> list[str]:
        """The script's notes of how attempts ended."""
        path = self.run_dir / "logs" / "attempts.jsonl"
        return [json.loads(line)["ended"] for line in path.read_text().splitlines()] if path.exists() else []


def ended(*statuses: int, then: str = "") -> str:
    """The end of the ranks that end with these statuses, the first of them first."""
    return f"""
import os, signal, sys, time
for rank, status in enumerate({statuses}):
    with open(os.environ['logs'] + f'/rank_{{rank}}.ended', 'w') as file:
        print(rank, status, 10**18 + rank, f'node{{rank + 1}}', file=file)
    open(os.environ['logs'] + f'/rank_{{rank}}.log', 'w').write(f'rank {{rank}} of 2 on node{{rank + 1}}, process 1\\n')
{then}
sys.exit({max(statuses, default=0)})
"""


def test_the_ranks_of_a_large_job_are_all_heard(tmp_path):
    """The names of 32,768 files are more than a command line takes."""
    attempt = Attempt(tmp_path, ALL_ENDED, MANY)
    assert attempt.status == 2, attempt.said
    assert "rank 31000 on node1 ended first, with status 2" in attempt.said and "the reason why" in attempt.said
    assert (tmp_path / "run/logs/attempt_1/ended").read_text().count("\n") == MANY - 1
    assert "too long" not in attempt.said


def test_the_silent_are_named_and_not_all_of_a_large_job(tmp_path):
    attempt = Attempt(tmp_path, "import os; os._exit(9)", 100)
    assert "no word from the ranks 0 1 2 " in attempt.said and " 31 and 68 more: their node is gone" in attempt.said
    assert "requeue 7" in attempt.asked and attempt.status == 0


@pytest.mark.parametrize("line", ["module load cuda", "cd /nonexistent", "false | false"])
def test_a_line_of_the_user_that_fails_ends_the_job_and_is_named(tmp_path, line):
    attempt = Attempt(tmp_path, setup=["export FINE=1", line, "touch never"])
    assert attempt.status == 2 and f"slurm.setup: this line failed: {line}" in attempt.said, attempt.said
    assert attempt.notes == [] and not (ROOT / "never").exists()


def test_a_shell_option_that_a_line_of_the_user_leaves_behind_ends_no_job(tmp_path):
    """As a site's file that is sourced may: a rank dies, and the job queues again all the same."""
    attempt = Attempt(tmp_path, ended(1, 75), setup=["set -euC -o pipefail"])
    assert attempt.status == 0 and "requeue 7" in attempt.asked, attempt.said
    assert "rank 0 on node1 ended first, with status 1" in attempt.said


@pytest.mark.parametrize(("away", "status"), [(3, 0), (99, 2)])
def test_a_disk_that_is_away_for_a_moment_ends_no_job(tmp_path, away, status):
    (tmp_path / "mkdir").write_text(
        f'#!/bin/bash\necho >>"$NOTES.disk"\n(($(wc -l <"$NOTES.disk") > {away})) && exec /bin/mkdir "$@"\n'
        'echo "mkdir: cannot create directory: Stale file handle" >&2 && exit 1\n'
    )
    (tmp_path / "mkdir").chmod(0o755)
    attempt = Attempt(tmp_path, ended(0, 0))
    assert attempt.status == status and ("no folder for this attempt" in attempt.said) == (status == 2), attempt.said


def test_a_line_that_is_none_is_refused(tmp_path):
    with pytest.raises(
        ValueError, match=r"slurm.setup: 'if true; then' is no whole command: .*; give a construct as one"
    ):
        Attempt(tmp_path, setup=["if true; then", "x=1", "fi"])
    attempt = Attempt(tmp_path, setup=["if true; then\n export X=1\nfi"])
    assert attempt.status == 0, attempt.said


def test_what_srun_is_told(tmp_path):
    """Processors always, the user's words after the script's own, and a secret that nobody prints."""
    attempt = Attempt(tmp_path, cpus_per_rank=3, srun_options=["--label"], setup=["set -x"], environment={"A": "x y"})
    assert attempt.status == 0, attempt.said
    assert attempt.notes[:2] == ["--cpus-per-task=3", "--cpu-bind=cores"] and "--label" in attempt.notes
    words = next(line for line in attempt.notes if line.startswith("secret ")).split()
    assert len(words[1]) == 64 and words[3] == "ALL" and words[1] not in attempt.said
    assert not any("--container" in note for note in attempt.notes)


def test_an_attempt_uses_other_step_numbers_than_the_one_before(tmp_path, monkeypatch):
    """Slurm numbers the sruns of a job anew in each attempt; the srun of a lost node cancels the step of its number."""
    used = []
    for restarts in range(3):
        monkeypatch.setenv("SLURM_RESTART_COUNT", str(restarts))
        (tmp_path / str(restarts)).mkdir()
        attempt = Attempt(tmp_path / str(restarts), preflight=True)
        assert attempt.status == 0, attempt.said
        lines = (tmp_path / str(restarts) / "steps").read_text().splitlines()
        used.append({number for number, line in enumerate(lines) if "rank.sh" in line})
    assert [len(numbers) for numbers in used] == [2, 2, 2], "the preflight and the training"
    assert not used[0] & used[1] and not used[1] & used[2]


def test_the_preflight_waits_as_long_as_the_run_says(tmp_path):
    Attempt(tmp_path, preflight=True, preflight_wait_s=421.5)
    (preflight,) = [line for line in (tmp_path / "steps").read_text().splitlines() if " preflight " in line]
    assert preflight.endswith("--wait 421.5")


@pytest.mark.parametrize(
    ("before", "status"), [(["died", "died"], 3), (["died", "lost"], 0), (["died", '"step": 0'], 0)]
)
def test_three_preflights_in_a_row_that_fail_end_the_job(tmp_path, before, status):
    """No rank notes that it has begun, so no rank would find that the job goes in circles."""
    notes = [f'"ended": "{word}"' if word.isalpha() else f'{word}, "ended": "died"' for word in before]
    (tmp_path / "run/logs").mkdir(parents=True)
    lines = [f'{{"time_unix_s": 1, "job": "slurm 7", "attempt": {n}, {note}}}\n' for n, note in enumerate(notes, 1)]
    (tmp_path / "run/logs/attempts.jsonl").write_text("".join(lines))
    attempt = Attempt(tmp_path, ended(1, 1), preflight=True, variables={"SLURM_RESTART_COUNT": "2"})
    assert attempt.status == status, attempt.said
    assert ("stops: three attempts in a row died before training began" in attempt.said) == (status == 3)


def test_what_an_older_preflight_found_excludes_nobody(tmp_path):
    """This one fails and cannot write what it found, as on a full disk."""
    logs = tmp_path / "run" / "logs"
    logs.mkdir(parents=True)
    (logs / "preflight.json").write_text('{"exclude": "--exclude=node9"}\n')
    attempt = Attempt(tmp_path, "import os; os._exit(5)", preflight=True)
    assert attempt.status == 5 and "the preflight failed and names no node" in attempt.said, attempt.said


IMAGE = {"container_image": "team/image.sqsh", "container_mounts": ["/data:/data:ro"]}


def test_a_container_is_unpacked_once_and_shows_what_processes_read(tmp_path):
    notes = Attempt(tmp_path, **IMAGE, preflight=True).notes
    assert notes.count("--container-name=hacpo-mega-7") == 2, "by the preflight and by the training"
    assert notes.count("--cpu-bind=cores") == 2 and "--container-image=team/image.sqsh" in notes
    mounts = next(note for note in notes if note.startswith("--container-mounts=")).partition("=")[2].split(",")
    assert mounts[-1] == "/data:/data:ro" and f"{tmp_path}:{tmp_path}" in mounts and f"{ROOT}:{ROOT}" in mounts
    assert f"--container-workdir={Path.cwd()}" in notes and "--no-container-mount-home" in notes
    own = ["--container-mount-home", "--container-name=mine"]
    (tmp_path / "own").mkdir()
    notes = Attempt(tmp_path / "own", **IMAGE, srun_options=own).notes
    assert not {"--no-container-mount-home", "--container-name=hacpo-mega-7"} & set(notes), "pyxis takes one of each"


@pytest.mark.parametrize("play", ["", "import os; os._exit(1)", "import os; os._exit(2)"])
def test_no_container_stays_behind(tmp_path, play):
    """Nor does what a lost attempt or an ended job of this run has left; another run's stays, and a running job's."""
    stays = ["pyxis_hacpo-mega-8", "pyxis_hacpo-mega-70", "pyxis_other", "pyxis_7_other", "hacpo-mega-7"]
    goes = ["pyxis_hacpo-mega-7", "pyxis_7_hacpo-mega-7", "pyxis_hacpo-mega-5"]
    (tmp_path / "containers").mkdir()
    (tmp_path / "run/slurm").mkdir(parents=True)
    for number in (5, 7, 8):
        (tmp_path / f"run/slurm/{number}.log").touch()
    for name in (*stays, *goes):
        (tmp_path / "containers" / name).touch()
    unpack = f"open({str(tmp_path / 'containers/pyxis_hacpo-mega-7')!r}, 'x');"
    attempt = Attempt(tmp_path, unpack + play, **IMAGE)
    assert sorted(path.name for path in (tmp_path / "containers").iterdir()) == sorted(stays), attempt.said
    assert attempt.said.count("removed the container pyxis_hacpo-mega-7") == 2, "before it begins, and at its end"
    ends = [line for line in attempt.asked if line.startswith(("enroot", "requeue"))]
    assert ends[-1] == "requeue 7" if attempt.status == 0 and play else "requeue 7" not in ends, "steps end there"


@pytest.mark.parametrize("sign", [",", ":", "$"])
def test_a_folder_that_pyxis_would_cut_is_refused(tmp_path, sign):
    folder = tmp_path / f"a{sign}b"
    folder.mkdir()
    Attempt(folder)
    with pytest.raises(ValueError, match=rf"/a\{sign}b.*: pyxis reads '\{sign}' in the path of a mount as its own"):
        Attempt(folder, **IMAGE)


def test_only_what_this_run_has_left_on_a_node_is_ended(tmp_path):
    """Its earlier attempts' processes, of this job and of jobs that are over, and what they alone have in /dev/shm."""
    run, other = tmp_path / "run", tmp_path / "run2"
    shared = Path("/dev/shm") / f"hacpo_mega_test_{os.getpid()}"
    maps = f"import mmap, time; f = open({str(shared)!r}, 'w+b'); f.truncate(9); m = mmap.mmap(f.fileno(), 9); "
    told = [(run, 9, 7, maps), (run, 9, 5, ""), (run, 9, 8, ""), (run, 1, 7, ""), (other, 9, 7, "")]
    command = [sys.executable, "-c"]
    left = []
    for at, attempt, job, does in told:
        names = {"HACPO_MEGA_RUN": str(at), "HACPO_MEGA_ATTEMPT": str(attempt), "SLURM_JOB_ID": str(job)}
        code = f"{does}import time; print(flush=True); time.sleep(600)"
        left.append(subprocess.Popen([*command, code], env=os.environ | names, stdout=subprocess.PIPE))
    try:
        for process in left:
            process.stdout.readline()
        assert shared.exists()
        attempt = Attempt(tmp_path)
        assert attempt.status == 0, attempt.said
        assert [left[number].wait(60) for number in (0, 1)] == [-9, -9] and not shared.exists()
        assert [process.poll() for process in left[2:]] == [None] * 3, "a running job's, this attempt's, another run's"
        (line,) = [line for line in attempt.said.splitlines() if "have left" in line]
        assert f"{left[0].pid} of attempt 9, job 7; " in line and line.endswith(f"removed {shared}")
    finally:
        shared.unlink(missing_ok=True)
        for process in left:
            process.kill()
            process.wait()
            process.stdout.close()


def test_a_file_of_keys_reaches_the_processes(tmp_path):
    """The line of docs/guide/slurm.md."""
    keys = tmp_path / "keys"
    keys.write_text("TRACKER_KEY=abc\n")
    line = f"set -a && source {keys} && set +a"
    play = "import os; print('key', os.environ['TRACKER_KEY'])"
    attempt = Attempt(tmp_path, play, setup=[line])
    assert "key abc" in attempt.said and "abc" not in attempt.script
    keys.unlink()
    attempt = Attempt(tmp_path, play, setup=[line])
    assert attempt.status == 2 and f"slurm.setup: this line failed: {line}" in attempt.said


def test_limits_are_raised_and_a_low_one_is_said(tmp_path):
    folder = tmp_path / "class/infiniband/mlx5_0/ports/1"
    folder.mkdir(parents=True)
    (folder / "state").write_text("4: ACTIVE\n")
    (folder / "link_layer").write_text("InfiniBand\n")
    lower = 'ulimit -Sn 90; ulimit -Hn 100; ulimit -l 64; source "$0"; raise_limits "$1"; ulimit -Sn'
    asked = ["bash", "-c", lower, ROOT / "launch/node.sh", tmp_path]
    said = subprocess.run(asked, capture_output=True, text=True, env=os.environ | {"SLURMD_NODENAME": "node1"}).stdout
    assert said == (
        "warning: node1 allows 64 KiB of locked memory (ulimit -Hl); InfiniBand wants it unlimited\n100\n"
    ), said


AWAY = "Slurm does not answer (scontrol error: Unable to contact slurm controller (connect failure)): asking again"


@pytest.mark.parametrize(("question", "status", "how"), [("show job", 137, "died"), ("requeue", 75, "told")])
def test_a_controller_that_is_away_is_asked_again(tmp_path, question, status, how):
    """As when it restarts at the end of an attempt, after a killed rank or the signal of the time limit."""
    attempt = Attempt(tmp_path, ended(status, 1), variables={"AWAY": "4", "AWAY_FOR": question})
    assert attempt.status == 0 and attempt.said.count(AWAY) == 1, attempt.said
    assert "for 60 minutes at most" in attempt.said and "] queues again\n" in attempt.said
    assert sum(question in line for line in attempt.asked) == 5 and attempt.asked[-1] == "requeue 7"
    assert attempt.ends == [how]


def test_a_controller_that_stays_away_ends_the_job_with_the_truth(tmp_path, monkeypatch):
    monkeypatch.setattr(slurm_script, "TEMPLATE", tmp_path / "impatient")
    template = (ROOT / "launch/slurm.sbatch").read_text()
    (tmp_path / "impatient").write_text(template.replace("controller_wait_s=3600", "controller_wait_s=0"))
    attempt = Attempt(tmp_path, ended(75, 75), variables={"AWAY": "999"})
    assert attempt.status == 75 and "requeue 7" not in attempt.asked
    said = f"does not queue again: Slurm has not answered for 0 minutes; by hand: sbatch {attempt.run_dir}/slurm/job.1"
    assert said in attempt.said and "Slurm ends this job" not in attempt.said


@pytest.mark.parametrize("state", ["COMPLETING", "PENDING"])
def test_only_another_state_is_the_end_that_slurm_makes(tmp_path, state):
    """The script is told to end as its processes are, and says so: their words are collected all the same."""
    told = ended(143, 143, then="os.kill(os.getppid(), signal.SIGTERM); time.sleep(0.5)")
    attempt = Attempt(tmp_path, told, variables={"STATE": state, "AWAY": "1"})
    assert attempt.status == 143 and attempt.ends == [] and "requeue 7" not in attempt.asked
    assert "told to end (SIGTERM)" in attempt.said and "ended first" not in attempt.said
    assert f"Slurm ends this attempt ({state})" in attempt.said
    assert (attempt.run_dir / "logs/attempt_1/ended").read_text().count("\n") == 2


def test_a_job_that_slurm_ends_at_its_limit_queues_again(tmp_path):
    """As when the controller was away at the signal, and back after the limit; and a full disk had cut a line."""
    (tmp_path / "run/logs").mkdir(parents=True)
    (tmp_path / "run/logs/attempts.jsonl").write_text('{"ended": "cut"}')
    told = ended(75, 75, then="os.kill(os.getppid(), signal.SIGTERM); time.sleep(0.5)")
    attempt = Attempt(tmp_path, told, variables={"STATE": "COMPLETING Reason=TimeLimit"})
    assert attempt.status == 0 and attempt.asked[-1] == "requeue 7" and attempt.ends == ["cut", "told"]


def test_a_job_that_is_being_signalled_queues_again(tmp_path):
    """Slurm 22.05 says so of a job near its limit, whose signal was under way when the controller went away."""
    attempt = Attempt(tmp_path, ended(75, 75), variables={"STATE": "SIGNALING"})
    assert attempt.status == 0 and attempt.asked[-1] == "requeue 7" and attempt.ends == ["told"]


def test_a_cancelled_job_is_said_to_be_one(tmp_path):
    attempt = Attempt(tmp_path, ended(9), variables={"STATE": "CANCELLED"})
    assert attempt.status == 9 and "does not queue again: Slurm ends this job (CANCELLED)" in attempt.said


@pytest.mark.parametrize(("state", "ends"), [("DOWN*", ["died", "lost"]), ("IDLE", ["died"])])
def test_a_lost_node_is_noted_when_slurm_knows(tmp_path, state, ends):
    first = Attempt(tmp_path, ended(1, then="os.remove(os.environ['logs'] + '/rank_0.ended')"))
    assert "no word from the ranks 0 1: " in first.said and first.ends == ["died"]
    second = Attempt(tmp_path, ended(0, 0), variables={"SLURM_RESTART_COUNT": "1", "NODE": state})
    assert second.status == 0 and second.ends == ends and "-o show node node1" in second.asked


def test_nodes_come_back_where_too_few_would_remain(tmp_path):
    """Nodes that this job has excluded come back, never those that others have."""
    found = {"exclude": "--exclude=node2"}
    bad = ended(5, 5, then=f"open(os.environ['logs'] + '/../preflight.json', 'w').write({json.dumps(found)!r})")
    attempts = []
    for name, spare in (("plenty", 3), ("one", 2), ("none", 1)):
        logs = tmp_path / name / "run" / "logs"
        logs.mkdir(parents=True)
        (logs / "attempts.left_out.7").write_text("node9\n")
        variables = {"SPARE": str(spare), "EXCLUDED": "node8,node9"}
        attempts.append(Attempt(tmp_path / name, bad, variables=variables, preflight=True))
    assert all(attempt.status == 0 for attempt in attempts), [attempt.said for attempt in attempts]
    plenty, one, none = attempts
    assert "too few" not in plenty.said and "queues again without node2\n" in plenty.said
    assert plenty.asked[-1] == "update JobId=7 ExcNodeList=node9,node2,node8"
    assert "too few nodes would remain without node9\n" in one.said and "queues again without node2\n" in one.said
    assert one.asked[-1] == "update JobId=7 ExcNodeList=node2,node8"
    assert "too few nodes would remain without node9,node2\n" in none.said
    assert "queues again in 10 minutes, with node2\n" in none.said
    assert none.asked[-2:] == ["update JobId=7 ExcNodeList=node8", "update JobId=7 StartTime=now+600"]


def test_what_another_launcher_has_told_the_shell_that_submits_is_dropped(tmp_path, monkeypatch):
    """And what the user sets for the processes is kept."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")
    for name in names:
        monkeypatch.setenv(name, "stale")
    play = "import os; open(os.environ['NOTES'], 'a').write(''.join(f'{n}={v}\\n' for n, v in os.environ.items()))"
    notes = Attempt(tmp_path, play, environment={"MASTER_PORT": "4711"}).notes
    assert [line for line in notes if line.partition("=")[0] in names] == ["MASTER_PORT=4711"]


def test_libraries_are_set_for_the_devices_of_the_node_they_run_on(tmp_path, monkeypatch):
    """The script of --job runs on a login node: without GPUs it would have switched the compiler of all ranks off."""
    for name in ("TORCHDYNAMO_DISABLE", "VLLM_LOGGING_LEVEL"):
        monkeypatch.delenv(name, raising=False)
    shown = "print(os.environ.get('TORCHDYNAMO_DISABLE', 'unset'), file=open(os.environ['NOTES'], 'a'))"
    assert Attempt(tmp_path, f"import os; {shown}").notes[-1] == "unset"
    (tmp_path / "nvidia-smi").write_text("")
    (tmp_path / "nvidia-smi").chmod(0o755)
    task = {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURMD_NODENAME": "node1"}
    command = ["bash", ROOT / "launch/rank.sh", tmp_path, "env"]
    environment = os.environ | task | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    assert subprocess.run(command, env=environment).returncode == 0
    log = (tmp_path / "rank_1.log").read_text()
    assert "VLLM_LOGGING_LEVEL=WARNING" in log and "TORCHDYNAMO_DISABLE" not in log, log


def test_nobody_waits_for_a_rank_that_refuses_its_input(tmp_path):
    """rank.sh says that it has, and the script ends those who wait for it in vain."""
    logs = tmp_path / "logs"
    logs.mkdir()
    job = {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURMD_NODENAME": "node2"}
    for status, refused in ((1, False), (2, True)):
        command = ["bash", ROOT / "launch/rank.sh", logs, "bash", "-c", f"exit {status}"]
        assert subprocess.run(command, env=os.environ | job).returncode == status
        assert (logs / "refused").exists() is refused
    late = (ROOT / "launch/rank.sh").read_text().replace("child=$!\n", "child=$!\nsleep 0.3\n")  # it has ended by then
    (tmp_path / "rank.sh").write_text(late)
    (tmp_path / "node.sh").write_text((ROOT / "launch/node.sh").read_text())
    command = ["bash", tmp_path / "rank.sh", logs, "bash", "-c", "exit 3"]
    assert "sleep 0.3" in late and subprocess.run(command, env=os.environ | job).returncode == 3
    waits = ended(2, then="open(os.environ['logs'] + '/refused', 'w').close(); time.sleep(3600)")
    for preflight in (False, True):
        (tmp_path / str(preflight)).mkdir()
        attempt = Attempt(tmp_path / str(preflight), waits, preflight=preflight)
        assert attempt.status == 2 and "starting again would change nothing" in attempt.said, attempt.said


def test_a_template_of_ones_own_has_the_same_placeholders(tmp_path):
    own = tmp_path / "own.sbatch"
    own.write_text("#!/bin/bash\n@directives@\n@settings@\n@setup@\necho mine of $num_ranks, me@site.org\n")
    attempt = Attempt(tmp_path, template=str(own))
    assert attempt.status == 0 and attempt.said == "mine of 2, me@site.org\n"
    for text, said in (
        ("@directives@ @settings@ @setup@ @nodes@", "@nodes@ is no placeholder"),
        ("@setup@", "is missing"),
    ):
        own.write_text(text)
        with pytest.raises(ValueError, match=f"slurm.template: .*{said}"):
            Attempt(tmp_path, template=str(own))


@pytest.mark.parametrize("sign", ["%", '"', "\\"])
def test_a_name_that_sbatch_reads_as_its_own_is_refused(tmp_path, sign):
    """In "50%j/slurm/%j.log" both are the number of the job: the log would lie in a folder that nobody made."""
    (tmp_path / f"50{sign}j").mkdir()
    with pytest.raises(ValueError, match=r"run_dir .* sbatch reads .* as its own"):
        Attempt(tmp_path / f"50{sign}j")


def test_only_infiniband_that_is_up_is_used(tmp_path):
    ports = {
        "mlx5_0/ports/1": ("4: ACTIVE", "InfiniBand"),
        "mlx5_1/ports/1": ("1: DOWN", "InfiniBand"),
        "mlx5_2/ports/1": ("4: ACTIVE", "Ethernet"),
        "mlx5_3/ports/2": ("4: ACTIVE", "InfiniBand"),
    }
    asked = ["bash", "-c", 'source "$0"; active_infiniband "$1"', ROOT / "launch/node.sh", tmp_path]
    assert subprocess.run(asked, capture_output=True, text=True).stdout == ""
    for port, (state, layer) in ports.items():
        folder = tmp_path / "class/infiniband" / port
        folder.mkdir(parents=True)
        (folder / "state").write_text(f"{state}\n")
        (folder / "link_layer").write_text(f"{layer}\n")
    assert subprocess.run(asked, capture_output=True, text=True).stdout == "=mlx5_0:1,mlx5_3:2\n"
