"""Processes that file permissions bind, whoever runs the tests."""

from __future__ import annotations

import ctypes
import os

_VERSION_3 = 0x20080522
_PR_CAPBSET_DROP = 24
_OVERRIDES = (1, 2, 3)
"""CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH and CAP_FOWNER: they let root read and write all files."""


class _Header(ctypes.Structure):
    _fields_ = [("version", ctypes.c_uint32), ("pid", ctypes.c_int)]


class _Set(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint32) for name in ("effective", "permitted", "inheritable")]


def obey_permissions() -> None:
    """Make file permissions bind this process, even as root (capabilities(7)).

    It keeps its user, so the modes of its files say what it may do. Raises OSError if the system
    refuses.
    """
    if os.geteuid() != 0:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    header, sets = _Header(_VERSION_3, 0), (_Set * 2)()
    if libc.capget(ctypes.byref(header), ctypes.byref(sets)) != 0:
        raise OSError(ctypes.get_errno(), "capget")
    for capability in _OVERRIDES:
        libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)
        sets[0].effective &= ~(1 << capability)
        sets[0].permitted &= ~(1 << capability)
        sets[0].inheritable &= ~(1 << capability)
    if libc.capset(ctypes.byref(header), ctypes.byref(sets)) != 0:
        raise OSError(ctypes.get_errno(), "capset")
