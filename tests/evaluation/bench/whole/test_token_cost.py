"""What libraries alone take for a token, measured with real processes on the shortest of loads."""

from octavo.bench.whole.token_cost import TokenLoad, measure_floors, to_lines


def test_libraries_alone_pass_as_many_tokens_on_as_were_asked_for() -> None:
    # The load itself counts tokens and streams, and raises for others.
    loads = [TokenLoad("gRPC", 1, 8, 0.0), TokenLoad("chat", 1, 8, 0.0), TokenLoad("gRPC", 3, 5, 1.0)]
    costs = list(measure_floors(loads))
    assert [cost.load for cost in costs] == [loads[0], loads[2]]
    for cost in costs:
        assert cost.is_floor
        assert cost.scheduler_wake_ups > 0
        assert cost.frontend_wake_ups > 0
        assert cost.token_ms > 0
    head, *lines = to_lines(costs)
    assert [line.partition("  ")[0] for line in lines] == [
        "libraries alone, gRPC, 1 stream, steps of 0 ms",
        "libraries alone, gRPC, 3 streams, steps of 1 ms",
    ]
    assert "goal" in head
