"""Streams: orders without a flush, in which operations read stale weights.

An order (:mod:`~megapipe.schedule.streams.orders`) says what each rank does window by window; a
policy (:mod:`~megapipe.schedule.streams.policies`) which version of the weights each operation
reads and when they are updated. Both together are a stream
(:mod:`~megapipe.schedule.streams.stream`), and some windows of it are an ordinary schedule.
"""
