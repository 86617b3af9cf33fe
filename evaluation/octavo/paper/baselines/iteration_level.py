"""Orca's batching: requests in order of arrival; after every iteration those that have ended leave, and new ones join
as soon as there is memory for them, with their whole prompts beside the others' decodes."""

from octavo.scheduler.core.step import chunked_policy
from octavo.scheduler.core.step.strategy import StepPolicy

POLICY = StepPolicy(chunked_policy.begin, chunked_policy.admits, chunked_policy.end, lookahead=1, whole_prompts=True)
