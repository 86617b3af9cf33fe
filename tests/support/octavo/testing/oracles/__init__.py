"""Holds oracles, which say a second time and slowly what must hold: references, books, sound plans at random."""
