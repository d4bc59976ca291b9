"""The waiting queue against a sorted list."""

import random

import pytest

from lab.sched.policies.fcfs import FirstComeFirstServed
from lab.sched.policies.priority import ByPriority
from lab.sched.queue import WaitingQueue
from tests.sched.harness import make_request


@pytest.mark.parametrize("policy_class", [FirstComeFirstServed, ByPriority])
@pytest.mark.parametrize("seed", range(5))
def test_it_serves_in_the_order_of_keys_whatever_is_removed(policy_class, seed):
    chooser = random.Random(seed)
    policy = policy_class(policy_class.Options())
    queue, waiting, number = WaitingQueue(policy), [], 0
    for _ in range(600):
        action = chooser.random()
        if action < 0.45:
            request = make_request(
                str(number), [1], number, arrival_s=float(chooser.randrange(9)), priority=chooser.randrange(3)
            )
            number += 1
            queue.push(request)
            waiting.append(request)
        elif action < 0.6 and waiting:
            queue.remove(waiting.pop(chooser.randrange(len(waiting))))
        elif waiting:
            assert queue.peek() is min(waiting, key=policy.key)
            waiting.remove(queue.pop())
        else:
            assert queue.peek() is None
        assert len(queue) == len(waiting)
        assert list(queue) == sorted(waiting, key=policy.key)
        assert len(queue._heap) <= 2 * len(waiting) + 17


def test_what_is_set_aside_keeps_its_place():
    queue = WaitingQueue(FirstComeFirstServed(None))
    requests = [make_request(str(i), [1], 0, arrival_s=0.0) for i in range(4)]  # equal keys: in the order of pushing
    for request in requests:
        queue.push(request)
    assert queue.peek() is requests[0]
    queue.set_aside()
    assert queue.peek() is requests[1] and queue.pop() is requests[1]
    assert queue.peek() is requests[2]
    queue.set_aside()
    assert len(queue) == 3
    queue.restore()
    assert list(queue) == [requests[0], requests[2], requests[3]]
    assert queue.peek() is requests[0]


def test_a_request_comes_back_to_its_place():
    queue = WaitingQueue(FirstComeFirstServed(None))
    first, second, third = (make_request(str(i), [1], i) for i in range(3))
    for request in (first, second, third):
        queue.push(request)
    assert queue.peek() is first
    queue.pop()
    queue.push(first)
    assert list(queue) == [first, second, third]
