# Source this before Python starts, on the node it runs on: in every process (launch/rank.sh does), or before a srun to
# nodes that are alike.
# What is set already stays. hacpo-mega sets the same values itself (hacpo_mega/cluster/machine/environment.py;
# tests/jobs/test_failure.py compares them), so they matter to whoever imports the package without its command line.

keep() { export "$1=${!1-$2}"; }  # keep NAME DEFAULT

keep VLLM_ENABLE_V1_MULTIPROCESSING 0 # the engine lives in the trainer's process, beside the actor that feeds it
keep VLLM_ALLOW_INSECURE_SERIALIZATION 0 # nothing is sent as a pickle, nor as a function to be run
keep VLLM_NO_USAGE_STATS 1            # nothing is reported to anybody
keep NO_VCS_VERSION 1                 # Megatron would run git beside its files for its version
keep TORCH_CPP_LOG_LEVEL ERROR        # torch warns of what it does not find on this machine
keep HF_HUB_OFFLINE 1                 # models are folders; a typo must not become a download on 512 nodes
keep TRANSFORMERS_OFFLINE 1           # the same, for transformers
keep HF_HUB_DISABLE_PROGRESS_BARS 1   # every rank would draw its own
keep TQDM_DISABLE 1                   # the same, of vLLM's graphs and of transformers' files
keep TOKENIZERS_PARALLELISM false     # its threads do not survive the forks of reward workers
keep PYTHONWARNINGS ignore:resource_tracker # it frees the shared memory of a process that was told to end, and complains
keep TORCH_GLOO_LAZY_INIT 1           # connect to whom we talk to, not all to all: 1000 ranks would need a million sockets

if compgen -G "/dev/nvidia[0-9]*" >/dev/null || command -v nvidia-smi >/dev/null; then
  keep VLLM_LOGGING_LEVEL WARNING       # what it says there explains a slow or a failed start
  keep FLASHINFER_LOGGING_LEVEL warning # it reports every step of its start
  keep CUDA_DEVICE_ORDER PCI_BUS_ID     # the numbers that nvidia-smi and Slurm give, on nodes of unequal GPUs, too
  keep VLLM_ALLREDUCE_USE_FLASHINFER 0  # else it would depend on nvcc and ninja on PATH, and be compiled at the start
  keep VLLM_USE_FLASHINFER_SAMPLER 0    # it takes no request with a seed
else
  keep VLLM_LOGGING_LEVEL ERROR         # it warns of every CUDA feature that a CPU lacks
  keep TORCHDYNAMO_DISABLE 1            # spares an 18 s compilation on the first answer
  keep ONEDNN_PRIMITIVE_CACHE_CAPACITY 64 # its own 1024 are several hundred MB; micro-batches have some 20 each
  keep LRU_CACHE_CAPACITY 64
fi
unset -f keep
