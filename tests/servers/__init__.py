"""Real database servers for the tests, on loopback, in temporary folders, ended with the tests."""
