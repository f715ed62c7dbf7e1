from serve.launcher.restart_policy import HEALTHY_S, MAX_DELAY_S, WINDOW_S, RestartPolicy


def test_the_first_restart_is_immediate_and_later_ones_wait_longer() -> None:
    policy = RestartPolicy()
    assert [policy.delay_after(None, at) for at in range(5)] == [0.0, 0.5, 1.0, 2.0, None]


def test_a_healthy_life_forgives_what_was_before() -> None:
    policy = RestartPolicy()
    for at in range(4):
        policy.delay_after(None, at)
    assert policy.delay_after(10.0, 10.0 + HEALTHY_S) == 0.0
    assert policy.delay_after(20.0, 20.0 + HEALTHY_S / 2) == 0.0


def test_old_failures_do_not_count() -> None:
    policy = RestartPolicy(max_quick_failures=2)
    assert policy.delay_after(None, 0.0) == 0.0
    assert policy.delay_after(None, WINDOW_S + 1) == 0.0
    assert policy.delay_after(None, WINDOW_S + 2) is None


def test_the_delay_is_bounded() -> None:
    policy = RestartPolicy(max_quick_failures=100)
    assert [policy.delay_after(None, at) for at in range(20)][-1] == MAX_DELAY_S
