"""launch/slurm.sbatch in real bash, with programs that stand in for Slurm's: what it says, and how it ends."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from repository import ROOT
from run_cases import CHARACTERS, agent_table, write_config

from hacpo_mega.config import load_config
from hacpo_mega.jobs.slurm_script import prepare

# Knows one job, which may be queued again; srun plays the ranks by $PLAY and notes what it was told.
SCONTROL = """#!/bin/bash
case "$*" in
  *hostnames*) printf 'node1\\nnode2\\n' ;;
  *"show job"*) echo "JobId=7 JobState=RUNNING ExcNodeList=(null)" ;;
  requeue*) echo "requeued" ;;
esac
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
logs=$2 python3 -c "$PLAY"
"""
# Knows the containers that its files name.
ENROOT = """#!/bin/bash
cd "$(dirname "$0")/containers"
case "$1" in
  list) ls ;;
  remove) [[ $2 == -f ]] && rm "$3" ;;
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
    """The script of a small run, run once."""

    def __init__(self, folder: Path, play: str = "", num_ranks: int | None = None, **slurm) -> None:
        agents = [agent_table(folder, name, "qwen3", CHARACTERS) for name in ("a", "b")]
        config = write_config(folder, agents, slurm={"gpus_per_node": 1, "preflight": False} | slurm)
        self.run_dir = folder / "run"
        text = prepare(load_config(config)).script(1)
        if num_ranks is not None:
            text = text.replace("num_ranks=2\n", f"num_ranks={num_ranks}\n")
        for name, content in (("scontrol", SCONTROL), ("srun", SRUN), ("enroot", ENROOT), ("squeue", SQUEUE)):
            (folder / name).write_text(content)
            (folder / name).chmod(0o755)
        job = {
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NODELIST": "node[1-2]",
            "SLURM_JOB_NUM_NODES": "2",
            "PLAY": play,
            "NOTES": str(folder / "notes"),
        }
        environment = os.environ | job | {"PATH": f"{folder}:{os.environ['PATH']}"}
        done = subprocess.run(["bash"], input=text, env=environment, capture_output=True, text=True, cwd=ROOT)
        self.status, self.said, self.script = done.returncode, done.stdout + done.stderr, text
        self.notes = (folder / "notes").read_text().splitlines() if (folder / "notes").exists() else []


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
    assert "requeued" in attempt.said and attempt.status == 0


@pytest.mark.parametrize("line", ["module load cuda", "cd /nonexistent", "false | false"])
def test_a_line_of_the_user_that_fails_ends_the_job_and_is_named(tmp_path, line):
    attempt = Attempt(tmp_path, setup=["export FINE=1", line, "touch never"])
    assert attempt.status == 2 and f"slurm.setup: this line failed: {line}" in attempt.said, attempt.said
    assert attempt.notes == [] and not (ROOT / "never").exists()


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
    said = attempt.said
    assert "requeued" not in said or said.rindex("removed the container") < said.index("requeued"), "steps end there"


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
