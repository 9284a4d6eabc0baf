"""Signals as a terminal gives them, for the processes that tests start."""

import signal

# a shell that starts a job in the background has it ignore Ctrl-C, which children inherit
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
