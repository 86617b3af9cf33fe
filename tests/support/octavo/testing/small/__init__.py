"""Small models, vocabularies and configurations, and every architecture tried on one."""
