"""Fakes of services that tests cannot use: real servers, clearly named as fakes."""
