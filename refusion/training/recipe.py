"""Recipes: a YAML file with every setting of a training, read strictly into frozen dataclasses."""

from __future__ import annotations

import copy
import dataclasses
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from refusion.data.config import DataConfig, SourceConfig
from refusion.errors import ConfigError
from refusion.training.schema import build, kind
from refusion.training.sections import LoraConfig, LossConfig, ModelSection, NoiseConfig, OptimConfig, RunConfig

_VARIABLE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")


@dataclass(frozen=True)
class Recipe:
    """All settings of one training, a section each."""

    data: DataConfig
    run: RunConfig
    model: ModelSection = field(default_factory=ModelSection)
    noise: NoiseConfig = field(default_factory=NoiseConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)

    def to_dict(self) -> dict[str, Any]:
        """Plain lists, dicts and scalars, fit for YAML and JSON; `recipe_from_dict` reads them back."""
        return _plain(dataclasses.asdict(self))


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Reads a recipe, applies `key.path=value` overrides, fills in environment variables and finds the data files.

    A relative path of a data file is tried from the working directory, then from the recipe's folder.

    Raises:
        ConfigError: the file or a data file is missing, the YAML is broken, or a setting is wrong.
    """
    path = Path(path)
    try:
        data = parse_yaml(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"the recipe {path} is missing; check the path") from None
    except OSError as error:
        raise ConfigError(f"the recipe {path} can't be read: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"the recipe {path} is not valid UTF-8") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"the recipe {path} is broken YAML: {_yaml_reason(error)}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"the recipe {path} should hold sections of keys and values, not {kind(data)}")
    try:
        recipe = recipe_from_dict(expand(apply_overrides(data, overrides)))
        sources = [_found(source, at, path.parent) for at, source in enumerate(recipe.data.sources)]
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    return dataclasses.replace(recipe, data=dataclasses.replace(recipe.data, sources=tuple(sources)))


def recipe_from_dict(data: Mapping[str, Any]) -> Recipe:
    """A recipe from plain data, such as `Recipe.to_dict` gives.

    Raises:
        ConfigError: a key is unknown or missing, or a value is of the wrong type or out of range.
    """
    return build(Recipe, data)


def apply_overrides(data: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """A copy of `data` with settings replaced, as `--set` asks for: `optim.lr=1e-3`, `data.sources.0.weight=2`.

    The value is read as YAML. Sections that aren't there are made; places in a list must exist.

    Raises:
        ConfigError: an override has no `=`, a broken value, or a place that can't be.
    """
    result: Any = copy.deepcopy(dict(data))
    for override in overrides:
        place, equals, text = override.partition("=")
        steps = [step.strip() for step in place.split(".")]
        if not equals or not all(steps):
            raise ConfigError(f"the override '{override}' should look like section.key=value")
        try:
            value = parse_yaml(text)
        except yaml.YAMLError as error:
            raise ConfigError(f"the override '{override}' has a broken value: {_yaml_reason(error)}") from None
        target = result
        for step, following in zip(steps, [*steps[1:], None], strict=True):
            key = _key(target, step, override)
            if following is None:
                target[key] = value
            elif isinstance(target, dict) and target.get(key) is None:
                target[key] = {}
            target = target[key]
    return result


def _key(target: Any, step: str, override: str) -> str | int:
    if isinstance(target, dict):
        return step
    if not isinstance(target, list):
        raise ConfigError(f"the override '{override}' goes through {kind(target)}, where '{step}' can't be")
    if not step.isdecimal() or int(step) >= len(target):
        raise ConfigError(f"the override '{override}' names entry '{step}' of a list that has {len(target)}")
    return int(step)


def expand(value: Any) -> Any:
    """The same data with `${NAME}` and `${NAME:-default}` in its texts replaced from the environment.

    Raises:
        ConfigError: a variable is not set and has no default.
    """
    if isinstance(value, dict):
        return {key: expand(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [expand(entry) for entry in value]
    return _VARIABLE.sub(_variable, value) if isinstance(value, str) else value


def _variable(match: re.Match[str]) -> str:
    name, default = match[1], match[2]
    found = os.environ.get(name)
    if default is not None:
        return found or default
    if found is None:
        raise ConfigError(f"the environment variable {name} is not set; set it or write ${{{name}:-default}}")
    return found


def _found(source: SourceConfig, number: int, folder: Path) -> SourceConfig:
    """The source with its path as it exists: from the working directory or from the recipe's folder."""
    if source.path is None:
        return source
    path = Path(source.path).expanduser()
    for candidate in (path, folder / path):
        if candidate.is_file():
            return dataclasses.replace(source, path=str(candidate))
    beside = "" if path.is_absolute() else f" from here ({Path.cwd()}) and from the recipe's folder"
    raise ConfigError(f"data.sources.{number}.path names {path}, which is not a file{beside}")


class _Loader(yaml.SafeLoader):
    """YAML with numbers such as 5e-4, which YAML 1.1 takes for text, and without keys given twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """As the base, but a second value for one key is an error."""
        seen = set()
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                continue
            if key_node.value in seen:
                raise yaml.MarkedYAMLError(problem=f"'{key_node.value}' twice", problem_mark=key_node.start_mark)
            seen.add(key_node.value)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9][0-9_]*(?:\.[0-9_]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def parse_yaml(text: str) -> Any:
    """YAML as recipes and overrides use it.

    Raises:
        yaml.YAMLError: the text is broken or gives a key twice.
    """
    return yaml.load(text, _Loader)


def _yaml_reason(error: yaml.YAMLError) -> str:
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
    reason = str(problem or error).splitlines()[0]
    return f"line {mark.line + 1}: {reason}" if mark else reason


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(entry) for key, entry in value.items()}
    return [_plain(entry) for entry in value] if isinstance(value, (list, tuple)) else value
