"""Packaging of hacpo_mega. The pinned environments are in launch/lock/; here are only the floors a user may vary."""

from pathlib import Path

from setuptools import find_packages, setup

RUNTIME = [
    "torch>=2.11",
    # its metadata exclude 3.11, for which it has a wheel: launch/lock/megatron_core.txt
    'megatron-core>=0.19.2; python_version >= "3.12"',
    "transformers>=5.16",
    "safetensors>=0.6",
    "pydantic>=2.12",
    "typer>=0.20",
    "rich>=14",
    "tomli-w>=1.0",
    "math-verify[antlr4_13_2]>=0.9",
    "tensorboard>=2.20",
    "matplotlib>=3.10",
    "pyarrow>=20",
    "scipy>=1.15",
    "triton>=3.6",
    "renderers>=0.1.12",
    "starlette>=0.50",
    "uvicorn>=0.38",
    "regex>=2025.1",
]

# What is no code and yet belongs to an installation: the job script's parts, and the configurations of the guide.
FILES = {"hacpo_mega.launch": "launch", "hacpo_mega.configs": "configs"}

# Beside the product, in the same wheel: graders, and studies, whose commands are found by their entry points.
BESIDE = {"hacpo_grading": "packages/hacpo_grading", "hacpo_lab": "packages/hacpo_lab"}

setup(
    name="hacpo_mega",
    version="0.2.0",
    license="Apache-2.0",
    description="Different language models teach each other by reinforcement learning (HACPO), at Megatron scale",
    long_description=Path("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    keywords="reinforcement-learning language-models megatron vllm hacpo rlvr",
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3 :: Only",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    python_requires=">=3.11,<3.14",
    packages=[
        *find_packages(include=["hacpo_mega", "hacpo_mega.*"]),
        "hacpo_kernels",
        *(package for name, folder in BESIDE.items() for package in find_packages(folder, include=[name, f"{name}.*"])),
        *FILES,
    ],
    package_dir={
        "hacpo_kernels": "kernels/hacpo_kernels",
        **{name: f"{folder}/{name}" for name, folder in BESIDE.items()},
        **FILES,
    },
    package_data={
        "hacpo_mega": ["py.typed"],
        "hacpo_mega.config.tables": ["words.toml"],
        "hacpo_mega.models": ["public.json"],
        "hacpo_mega.report": ["style.css"],
        "hacpo_mega.watch": ["page/*"],
        "hacpo_grading": ["py.typed"],
        "hacpo_kernels": ["py.typed"],
        "hacpo_lab": ["py.typed"],
        "hacpo_mega.launch": ["*.sh", "*.sbatch"],
        "hacpo_mega.configs": ["*.toml", "*/*.toml", "*/*.py"],
    },
    entry_points={
        "console_scripts": ["hacpo-mega = hacpo_mega.cli:main"],
        "hacpo_mega.commands": [
            f"{name} = hacpo_lab.commands.{name}:{name}" for name in ("experiment", "screen", "bench", "chaos", "plan")
        ],
        "hacpo_mega.watch.studies": [
            "experiment = hacpo_lab.views.experiment:KIND",
            "bench = hacpo_lab.views.benchmark:BENCH",
            "scaling = hacpo_lab.views.benchmark:SCALING",
        ],
    },
    install_requires=RUNTIME,
    extras_require={
        "cuda": ["vllm>=0.32,<0.34"],  # 0.31 lacks names that are imported; no later one was tried
        "te": ["transformer-engine[pytorch]>=2.14,<2.20"],  # what megatron-core 0.19.2 takes
        "datasets": ["datasets>=4"],  # data sets by their name on the Hub; 4 is the first that runs no loading script
        # in no lock file: some ask for older versions than the locks have
        "trackers": ["wandb", "trackio>=0.43", "swanlab", "mlflow", "comet_ml"],
        # in no lock file: with it transformers imports accelerate, in every process
        "peft": ["peft>=0.21"],
        # in no lock file: drives an installed Chromium in the tests of the watch page
        "browser": ["playwright>=1.50"],
        "test": [
            "pytest>=8",
            "pytest-timeout",
            "pytest-xdist>=3.6",
            "hypothesis",
            "ruff",
            "nbclient",
            "nbformat",
            "ipykernel",
        ],
    },
)
