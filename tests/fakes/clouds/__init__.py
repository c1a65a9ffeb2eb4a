"""Fake clouds with real hosts: everything that SkyPilot, boto3 and Google's clients need, in one network namespace.

Tests use `World` (world.py). AWS is moto with the parts of EC2 that moto lacks; Compute Engine, IAM and Cloud Storage
are our own partial servers; a host is a set of namespaces with sshd and a metadata service. Clients are unmodified and
get only endpoints, credentials and addresses.
"""
