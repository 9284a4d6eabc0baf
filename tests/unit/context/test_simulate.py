"""The time of plans, where it is known."""

from __future__ import annotations

import pytest

from megapipe.context import plans
from megapipe.context.plan import Message, Plan
from megapipe.context.score_rects import score_rects
from megapipe.context.simulate import MessageLink, PlanTiming, simulate
from megapipe.context.split import Order, PositionSplit


def timed(plan: Plan, work: float, message: float) -> PlanTiming:
    """Simulate a plan in which all pairs take equally long, and all messages."""
    return simulate(plan, plan.forward, lambda i, j: work, lambda _: MessageLink("", message))


@pytest.mark.parametrize("n", [1, 2, 3, 5, 8])
def test_a_ring(n: int) -> None:
    """Transfers hide behind rounds that are longer, and take their place where they are not."""
    assert timed(plans.ring(n), 2.0, 1.5) == (2.0 * n, 2.0 * n)
    assert timed(plans.ring(n), 2.0, 3.0) == (3.0 * (n - 1) + 2.0, 2.0 * n)
    assert timed(plans.ring(n), 2.0, 3.0).exposed == pytest.approx(n - 1)


def test_gradients_follow_a_ring() -> None:
    """The last gradients return after their last rank is through: one hop more."""
    plan = plans.ring(4)

    def link(message: Message) -> MessageLink:
        return MessageLink(message.what, 1.0)

    assert simulate(plan, plan.backward, lambda i, j: 2.0, link) == (9.0, 8.0)


@pytest.mark.parametrize(("n", "inner"), [(4, 2), (8, 2), (8, 4), (9, 3)])
@pytest.mark.parametrize("slow", [1.5, 3.0, 20.0])
def test_a_double_ring_over_nodes(n: int, inner: int, slow: float) -> None:
    """With fast links within a node, a double ring waits less than a flat ring does."""

    def link(message: Message) -> MessageLink:
        within = message.source // inner == message.target // inner
        return MessageLink(within, 0.5 if within else slow)

    def exposed(plan: Plan) -> float:
        return simulate(plan, plan.forward, lambda i, j: 1.0, link).exposed

    assert exposed(plans.double_ring(n, inner)) < exposed(plans.ring(n))


@pytest.mark.parametrize("n", [2, 4, 8])
def test_stripes_against_pieces(n: int) -> None:
    """Without transfers, contiguous blocks take (2n - 1) / n of the time of stripes."""
    length = 256 * n

    def seconds(order: Order) -> float:
        blocks = PositionSplit(n, 1, order).local([length], 0).blocks

        def work(i: int, j: int) -> float:
            return float(sum(entry.scores for entry in score_rects(blocks[i], blocks[j])))

        plan = plans.ring(n)
        return simulate(plan, plan.forward, work, lambda _: MessageLink("", 0.0)).whole

    assert seconds("contiguous") / seconds("striped") == pytest.approx((2 * n - 1) / n, rel=0.02)
    assert seconds("striped") / seconds("zigzag") == pytest.approx(1, rel=0.02)


def test_a_link_carries_one_message_at_a_time() -> None:
    """A rank that gets queries and keys at once waits for both where they share the way."""
    plan = plans.teams(4, 2)

    def end(of: str) -> float:
        def link(message: Message) -> MessageLink:
            return MessageLink(message.kind if of == "each" else "", 3.0)

        return simulate(plan, plan.forward, lambda i, j: 1.0, link).whole

    assert end("each") < end("one")
