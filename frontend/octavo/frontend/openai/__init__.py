"""The HTTP door: the OpenAI API and its neighbours."""
