"""`lab check`: the contract tests of a plugin's kind on one plugin."""

import json

from lab import registry
from lab.capabilities import Needs, unmet
from lab.checks import CheckResult, run_checks
from lab.cli.arguments import Arguments
from lab.cli.machine import unusable
from lab.config import plugin_to_check
from lab.errors import UserError


def check(arguments: Arguments) -> int:
    """Run the checks, print a line each and a verdict. Returns 0, or 1 when one failed."""
    registry.discover(arguments.plugins)
    entry, options = plugin_to_check(arguments.overrides)
    if not unmet(entry.capabilities, Needs()):
        entry = entry.with_options(options)  # what it needs is here: if it cannot be imported, its own traceback says why
    if reasons := unusable(entry):
        raise UserError(f"{entry.kind} plugin '{entry.name}' cannot be checked on this machine: {'; '.join(reasons)}.")
    results: list[CheckResult] = []
    for result in run_checks(entry, options):
        results.append(result)
        if not arguments.json:
            print(_line(result), flush=True)
    failed = [r for r in results if not r.ok]
    if arguments.json:
        rows = [
            {"name": r.name, "proves": r.proves, "ok": r.ok, "reason": r.reason, "not_declared": r.not_declared}
            for r in results
        ]
        print(json.dumps({"kind": entry.kind, "name": entry.name, "ok": not failed, "checks": rows}))
    else:
        left_out = sum(bool(r.not_declared) for r in results)
        rest = f"; {left_out} of {len(results)} checks were left out: it does not claim what they test" if left_out else ""
        verdict = f"breaks its contract: {len(failed)} of {len(results)} checks failed" if failed else "keeps its contract"
        print(f"\n{entry.kind} plugin '{entry.name}' {verdict}{rest}.")
    return 1 if failed else 0


def _line(result: CheckResult) -> str:
    if result.not_declared:
        return f"not declared  {result.name} ({result.not_declared}): {result.proves}"
    if result.ok:
        return f"ok            {result.name} ({result.seconds:.1f} s): {result.proves}"
    reason = result.reason.replace("\n", f"\n{14 * ' '}")
    return f"FAILED        {result.name} ({result.seconds:.1f} s): {result.proves}\n{14 * ' '}{reason}"
