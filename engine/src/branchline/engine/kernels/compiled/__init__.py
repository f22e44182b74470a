"""Triton forms of the kernels. Importing a module here needs Triton; nothing outside `kernels` imports it.

With `triton.knobs.runtime.interpret` set before Triton's first import they run on CPU tensors, statement by statement;
then, and for float32 inputs, they compute in float32 from the load on (WIDE), since the interpreter has no bfloat16
arithmetic. A kernel's name says what one program of its grid makes.
"""
