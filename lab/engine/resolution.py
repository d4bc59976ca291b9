"""Which plugin serves each component of a run, decided once at start and written down."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from lab import registry
from lab.capabilities import Capabilities, Needs, Verdict, choose, unmet
from lab.settings import PluginChoice

USABLE = "usable; "  # begins the reason why a plugin that could have served was not chosen


@dataclass(frozen=True)
class Resolved:
    """The plugin chosen for a component, its validated options, and the record of the choice for resolved.json."""

    entry: registry.Entry
    options: Any
    record: dict[str, Any]

    def make(self, *args: Any) -> Any:
        """An instance of the plugin: its constructor takes the options first."""
        return self.entry.load()(self.options, *args)


def resolve(kind: str, choice: PluginChoice, needs: Needs) -> Resolved:
    """Pick the plugin for `choice` and validate its options.

    Raises:
        UserError: unknown name, a need it does not meet, or an option that is not one.
    """
    if choice.name != "auto":
        registry.get(kind, choice.name)
    verdicts = []
    for entry in registry.entries(kind):
        if entry.broken:
            verdicts.append(Verdict(entry.name, ("its file is broken",)))
        elif choice.name not in ("auto", entry.name) and entry.static_capabilities is None:
            verdicts.append(Verdict(entry.name, ("not chosen",)))
        else:
            capabilities = _capabilities(entry, choice, needs)
            verdicts.append(Verdict(entry.name, tuple(unmet(capabilities, needs)), capabilities.priority))
    if choice.name != "auto" and registry.get(kind, choice.name).broken:
        registry.get(kind, choice.name).load()
    name = choose(kind, choice.name, verdicts, choice.options)
    entry = registry.get(kind, name)
    options = entry.make_options(choice.options)
    passed_over = {v.name: list(v.reasons) or _not_chosen(choice, name) for v in verdicts if v.name != name}
    record = {
        "name": name,
        "asked_for": choice.name,
        "class": f"{entry.module}.{entry.class_name}",
        "source": entry.source,
        "digest": entry.digest,
        "options": dict(choice.options),
        "passed_over": passed_over,
    }
    if parts := _parts(entry, options):
        record["parts"] = parts
    return Resolved(entry, options, record)


def _capabilities(entry: registry.Entry, choice: PluginChoice, needs: Needs) -> Capabilities:
    """Those of the plugin asked for may depend on its options; they are asked where its class can be imported."""
    if entry.name != choice.name or unmet(entry.capabilities, Needs(device=needs.device)):
        return entry.capabilities
    return entry.with_options(entry.make_options(choice.options)).capabilities


def _parts(entry: registry.Entry, options: Any) -> dict[str, dict[str, Any]]:
    """The plugins that this one hands its work to, as they are recorded."""
    parts = getattr(entry.load(), "parts", None)
    return {
        part: {"name": its.name, "class": f"{its.module}.{its.class_name}", "digest": its.digest, "options": asdict(made)}
        for part, (its, made) in (parts(options) if parts else {}).items()
    }


def _not_chosen(choice: PluginChoice, name: str) -> list[str]:
    return [f"{USABLE}'{name}' was asked for" if choice.name != "auto" else f"{USABLE}'{name}' has a higher priority"]


def told(records: Mapping[str, Mapping[str, Any]]) -> str:
    """The plugins that serve a run, from their records, in one line; without those that have nothing to do in it."""
    parts = []
    for kind in sorted(records, key=lambda kind: kind != "attention"):
        record = records[kind]
        is_idle = kind == "moe" and record["name"] == "none" or kind == "draft_length" and records["spec"]["name"] == "none"
        is_further_layers = ".attention" in kind or kind.startswith("attention.")
        if not is_idle and not (is_further_layers and record["name"] == records["attention"]["name"]):
            parts.append(f"{kind}={record['name']}{_how(record)}")
    return ", ".join(parts)


def _how(record: Mapping[str, Any]) -> str:
    """What the name alone does not say: why `auto` chose it, and what it is put together from."""
    remarks = [f"{part} {its['name']}" for part, its in record.get("parts", {}).items()]
    if record["asked_for"] == "auto" and record["name"] != "none":
        others = sum(reasons[0].startswith(USABLE) for reasons in record["passed_over"].values())
        remarks.append(f"auto: of {others + 1} usable ones the highest priority" if others else "auto: the only usable one")
    return f" ({', '.join(remarks)})" if remarks else ""
