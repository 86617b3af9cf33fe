"""Encoders, whose tokens see those before and after them: the families of BERT, XLM-RoBERTa and ModernBERT."""
