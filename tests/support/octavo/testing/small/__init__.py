"""Makes small models, vocabularies and configurations, and tries every architecture on one."""
