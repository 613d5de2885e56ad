"""Plans: rings, the settings that realise them, what to expect, and the proof."""
