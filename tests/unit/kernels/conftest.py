"""Where there is no CUDA device, kernels run in Triton's interpreter: it must be asked for before triton is imported."""

import os
from typing import Any

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    import triton.language
    from triton.runtime import interpreter

    if not isinstance(triton.language.cdiv, interpreter.InterpretedFunction):
        raise RuntimeError("triton was imported before its interpreter was asked for: set TRITON_INTERPRET=1")
    patch_tensor = interpreter._patch_lang_tensor

    def patch_tensor_and_index(tensor: Any, scope: Any) -> None:
        """Triton 3.6 takes loop bounds by int() of arrays of one element, which numpy 2.4 refuses."""
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_tensor_and_index
