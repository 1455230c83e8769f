"""Acceptance: walks, trees and statistics. Arrays in, numbers out; no model, no file."""
