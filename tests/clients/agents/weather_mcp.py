"""A server of the Model Context Protocol with one tool, over stdin and stdout. Needs only the standard library."""

import json
import sys
from typing import Any

_WEATHER = {
    "name": "weather",
    "description": "Tells the weather of a city.",
    "inputSchema": {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
        "required": ["city"],
    },
    # Else a client asks its user first.
    "annotations": {"readOnlyHint": True, "destructiveHint": False, "openWorldHint": False},
}


def answer(method: str, parameters: dict[str, Any]) -> dict[str, Any] | None:
    """The result of a call; None for a method that is not known."""
    match method:
        case "initialize":
            return {
                "protocolVersion": parameters.get("protocolVersion", "2025-06-18"),
                "capabilities": {"tools": {}},
                "serverInfo": {"name": "weather", "version": "1"},
            }
        case "tools/list":
            return {"tools": [_WEATHER]}
        case "tools/call":
            text = f"sunny in {parameters['arguments']['city']}"
            return {"content": [{"type": "text", "text": text}], "isError": False}
        case "ping":
            return {}
    return None


def main() -> None:
    for line in sys.stdin:
        asked = json.loads(line)
        if "id" not in asked:
            continue
        result = answer(asked["method"], asked.get("params") or {})
        unknown = {"error": {"code": -32601, "message": f"no method {asked['method']}"}}
        reply = {"jsonrpc": "2.0", "id": asked["id"], **({"result": result} if result is not None else unknown)}
        print(json.dumps(reply), flush=True)


if __name__ == "__main__":
    main()
