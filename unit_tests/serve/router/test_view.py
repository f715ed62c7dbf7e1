"""What a view costs the router."""

import pytest

from serve.router.view import ViewMaker
from unit_tests.serve.router.router_fakes import Harness, prompt_of


@pytest.mark.parametrize("groups", [("full",), ("full", "state")])
def test_what_is_arriving_is_gathered_once_a_view_whatever_waits(
    groups: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
):
    gathered, plain = [], ViewMaker._arriving

    def counted(views: ViewMaker) -> object:
        gathered.append(views)
        return plain(views)

    harness = Harness(groups=groups)
    for index in range(6):
        harness.submit(prompt_of(40, index))
    engine = harness.router.engine
    assert engine is not None
    monkeypatch.setattr(ViewMaker, "_arriving", counted)
    growth = dict.fromkeys(engine.ledger.groups, 0)
    view = engine.planner._views.view(harness.clock.now, True, growth, False, None)
    assert len(view.candidates) > 1
    assert len(gathered) == 1
    gathered.clear()
    assert engine.planner._views.view(harness.clock.now, False, growth, False, None).candidates == ()
    assert not gathered
