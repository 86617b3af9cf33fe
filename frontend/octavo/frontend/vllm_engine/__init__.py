"""The gRPC door for gateways that speak vLLM's engine protocol: token ids in, token ids out."""
