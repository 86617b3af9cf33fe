"""The options that several processes have alike."""

from typing import Final

from octavo.runtime.options.option import FilePath, OneOf, Option, Parsed

MODEL: Final = Option(
    "--model",
    "Model directory, GGUF file, the bundled model's name, or a model of the Hugging Face hub as"
    " org/name[@revision][:quantization].",
)
# `auto` is what the model has.
LOAD_FORMAT: Final = Option(
    "--load-format",
    "Where weights come from: the model's safetensors or GGUF file (auto), safetensors alone, or dummy: random numbers,"
    " no weight file needed.",
    OneOf(("auto", "safetensors", "dummy")),
)
# Octavo's own families where they can and transformers otherwise, or only one of the two.
MODEL_IMPL: Final = Option(
    "--model-impl",
    "Who computes the model: Octavo itself (native), transformers, or the first of them that can (auto).",
    OneOf(("auto", "native", "transformers")),
)
# The formats of octavo.kernels.quantize, which takes torch.
QUANTIZATION: Final = Option(
    "--quantization",
    "Format into which weights are quantised as they are loaded; the embedding and the LM head are q8_0 at least.",
    OneOf(("none", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0")),
)
DRAFT_MODEL: Final = Option(
    "--draft-model",
    "Directory of a smaller model with the same vocabulary, which guesses what the model will say where that makes it"
    " faster; on CPUs.",
    Parsed(str, "DIRECTORY"),
)
NUMERICS: Final = Option(
    "--numerics",
    "exact: a request's tokens and logprobs never depend on what runs beside it (float32 on a CPU); refused where that"
    " cannot be kept.",
    OneOf(("default", "exact")),
)
GENERATION_CONFIG: Final = Option(
    "--generation-config",
    "What stands in for sampling parameters that a request leaves out: the model's generation_config.json (auto), or"
    " neutral values (none).",
    OneOf(("auto", "none")),
)
# Both: `auto` asks the model's chat template. The names are vLLM's, where it has one.
TOOL_CALL_PARSER: Final = Option(
    "--tool-call-parser",
    "How tool calls are found in an answer: in the model's own format (auto), in a given one, or never (none).",
    OneOf(
        (
            *("auto", "none", "command_r", "deepseek_v3", "deepseek_v31", "deepseek_v32", "functiongemma", "gemma4"),
            *(
                "glm45",
                "granite",
                "hermes",
                "kimi_k2",
                "llama3_json",
                "llama4_pythonic",
                "minimax_m2",
                "mistral",
                "mistral_args",
            ),
            *("openai", "phi4_mini_json", "pythonic", "qwen3_coder", "seed_oss"),
        )
    ),
)
REASONING_PARSER: Final = Option(
    "--reasoning-parser",
    "How reasoning is set apart in an answer: in the model's own format (auto), in a given one, or never (none).",
    OneOf(
        (
            *("auto", "none", "cohere", "deepseek_r1", "deepseek_v3", "ernie45", "glm45", "granite", "hunyuan_a13b"),
            *("kimi_k2", "minimax_m2", "mistral", "nemotron_v3", "olmo3", "openai_gptoss", "qwen3", "seed_oss"),
            "step3",
        )
    ),
)
INSECURE_TCP: Final = Option(
    "--insecure-tcp",
    "Allow tcp:// endpoints beyond loopback: unencrypted, for networks that only Octavo's processes can reach.",
)
METRICS_LISTEN: Final = Option(
    "--metrics-listen", "Where to serve Prometheus metrics, as host:port; never public. Default: nowhere."
)
INSECURE_METRICS: Final = Option(
    "--insecure-metrics", "Allow a --metrics-listen beyond this machine: it asks nobody for a key."
)
OTLP_ENDPOINT: Final = Option(
    "--otlp-endpoint", "OTLP collector (gRPC) to send traces to, as http://host:port. Default: no traces."
)
API_KEYS: Final = Option(
    "--api-keys", "JSON file of tenants and their API keys; without one nobody is asked for a key.", FilePath()
)
TLS_CERTIFICATE: Final = Option("--tls-certificate", "PEM file, for gRPC and HTTP.", FilePath())
TLS_KEY: Final = Option("--tls-key", "PEM file of the certificate's key.", FilePath())
TLS_CLIENT_CA: Final = Option(
    "--tls-client-ca", "PEM file: clients must show a certificate that one of these authorities has signed.", FilePath()
)
PINNED_PREFIXES: Final = Option(
    "--pinned-prefixes",
    'JSON file {"name": "text", ...}: beginnings of prompts that stay computed, for requests to name.',
    FilePath(),
)
