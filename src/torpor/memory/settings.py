"""What a pool is made with."""

from __future__ import annotations

from dataclasses import dataclass, fields

from torpor.errors import ConfigurationError
from torpor.memory.types import IMAGE_USES, POLICIES, ImageUse, Policy


@dataclass(frozen=True, kw_only=True)
class PoolSettings:
    """None: not said. A new pool then takes the default, an existing one is taken as it is."""

    policy: Policy | None = None
    exportable: bool | None = None
    guarded: bool | None = None
    image: ImageUse | None = None

    def check(self) -> None:
        _one_of("policy", self.policy, POLICIES)
        _one_of("image", self.image, IMAGE_USES)

    def or_defaults(self) -> PoolSettings:
        return PoolSettings(
            policy=self.policy or "host",
            exportable=bool(self.exportable),
            guarded=bool(self.guarded),
            image=self.image or "retain",
        )

    def check_agrees(self, tag: str, existing: PoolSettings) -> None:
        for item in fields(self):
            said, have = getattr(self, item.name), getattr(existing, item.name)
            if said is not None and said != have:
                message = f"pool {tag!r} exists with {item.name}={have!r}, not {said!r}: a tag has one setting"
                raise ConfigurationError(message, setting=item.name, value=said)


def _one_of(setting: str, value: str | None, known: tuple[str, ...]) -> None:
    if value is not None and value not in known:
        raise ConfigurationError(f"{setting} {value!r} is not known; known: {', '.join(known)}", setting=setting, value=value)


def checked_policy(tag: str, value: str) -> Policy:
    for policy in POLICIES:
        if value == policy:
            return policy
    message = f"policy {value!r} for tag {tag!r} is not known; known: {', '.join(POLICIES)}"
    raise ConfigurationError(message, setting="policy", value=value)
