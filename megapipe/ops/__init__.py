"""Optional kernels: apex, flash-attn, Liger and torch's own variants, behind one selection.

The torch path is always available. No other package imports an optional kernel; layers call what
:class:`megapipe.ops.kernels.Kernels` holds.
"""
