"""Why a model is refused before its weights are read."""


class ConfigError(Exception):
    """A config.json that is broken, or asks for something Octavo does not do."""


class UnsupportedSetting(ConfigError):
    """A config.json that is sound, of a model that the native families do not compute."""
