"""The gRPC door for gateways that speak vLLM's engine protocol."""
