"""What `import lab` offers."""

import lab


def test_the_package_shows_what_it_is_for_and_nothing_else():
    assert {"LLM", "AsyncLLM", "SamplingParams", "UserError"} <= set(dir(lab))
    assert not {"Any", "TYPE_CHECKING", "errors"} & set(dir(lab))
    assert all(getattr(lab, name) is not None for name in dir(lab))
