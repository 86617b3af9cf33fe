"""An open-loop load generator for servers of language models: `octavo bench serve`."""
