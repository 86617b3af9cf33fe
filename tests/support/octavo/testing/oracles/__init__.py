"""What must hold, written down a second time and slowly: references, books, sound plans at random."""
