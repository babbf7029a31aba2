"""What ``paceline complete`` asks for."""

from cluster.completion import CompletionRequest


def test_neither_run_of_a_comparison_leaves_an_answer_for_the_next_to_copy() -> None:
    request = CompletionRequest("def fib(n):", 8, temperature=0.0, seed=1)
    drafted, plain = (request.body(speculate=speculate) for speculate in (True, False))
    assert drafted.pop("speculation") == {"enabled": True, "remember": False}
    assert plain.pop("speculation") == {"enabled": False, "remember": False}
    assert drafted == plain
