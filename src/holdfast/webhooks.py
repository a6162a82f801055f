"""What webhooks need beside `hook`: requests, answers, and verifiers of signatures.

from holdfast.webhooks import Response, WebhookRequest, github_signature
"""

from holdfast.workflows.hooks_records import Response
from holdfast.workflows.hooks_requests import WebhookRequest
from holdfast.workflows.hooks_verify import github_signature, stripe_signature

__all__ = ["Response", "WebhookRequest", "github_signature", "stripe_signature"]
