"""Before any test: without a GPU the Triton kernels run in Triton's interpreter.

Triton decides at import, so hacpo_kernels is imported here under the variable; afterwards the variable is as it was,
so that engines and ranks which tests start do not interpret their own kernels.
"""

import importlib
import os

import torch

if not torch.cuda.is_available():
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"
    # Gluon too: Triton imports it at the first launch, and it refuses a half-interpreted language then.
    for module in ("hacpo_kernels", "triton.experimental.gluon"):
        importlib.import_module(module)
    if before is None:
        del os.environ["TRITON_INTERPRET"]
