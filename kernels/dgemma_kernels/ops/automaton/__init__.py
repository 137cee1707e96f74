"""Conditioning on a language: sums over the paths of a token automaton."""
