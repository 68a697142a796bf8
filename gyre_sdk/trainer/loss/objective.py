"""From scores to the summed loss of targets."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gyre_sdk.errors import TrainerError
from gyre_sdk.trainer.loss import surrogates
from gyre_sdk.trainer.loss.correction import Correction, call_sum, correction
from gyre_sdk.trainer.loss.metrics import TokenLoss, observe
from gyre_sdk.trainer.loss.targets import Targets
from gyre_sdk.trainer.loss_options import Inner, LossOptions, Surrogate

_ALONE = frozenset(
    {"behaviour_K", "advantage_K", "weight_K", "row_share_K", "staleness_K", "reference_K", "proximal_K"}
)
"""What the loss of a target can depend on where it depends on no other target."""


@dataclass(frozen=True, slots=True)
class _Terms:
    """A loss target by target. Factors without gradient; None for what these options do not have."""

    loss_K: Tensor  # noqa: N815
    policy_K: Tensor  # noqa: N815
    logp_K: Tensor  # noqa: N815
    log_taken_K: Tensor  # noqa: N815
    """Log of the ratio that the surrogate takes, before any bound."""
    share_K: Tensor  # noqa: N815
    kl_K: Tensor | None  # noqa: N815
    phi_K: Tensor | None  # noqa: N815
    high_K: Tensor | None  # noqa: N815
    targets: Targets
    correction: Correction


def loss_sum(
    options: LossOptions, targets: Targets, logp_K: Tensor, entropy_K: Tensor, index_K: Tensor | None = None
) -> Tensor:
    """Return the summed loss of targets, to be divided by the batch's `denominator` when it is closed::

        sum_t c_t ( m_t w_t l_t + beta k_t ) - e_t entropy_coef H_t      over targets that are not masked

    c: coefficient; l: surrogate; w: importance weight; m: 1 where the entropy is high; k: KL to the reference;
    H: entropy; e: its factor, so that the entropies divided as the loss is have a mean.

    Args:
        targets: of a whole unit.
        logp_K: log-prob (nats) of each target under the policy in training.
        entropy_K: entropy (nats) of the policy where it was sampled.
        index_K: places of these scores among the targets, when they come in parts; None when all are there.

    Raises:
        TrainerError: parts of a loss that is not separable, or something is missing that the options need.
    """
    return _terms(options, targets, logp_K, entropy_K, index_K, _ALONE).loss_K.sum()


def loss(
    options: LossOptions, targets: Targets, logp_K: Tensor, entropy_K: Tensor, index_K: Tensor | None = None
) -> TokenLoss:
    """Return the summed loss of targets as `loss_sum` does, and what is logged of it."""
    terms = _terms(options, targets, logp_K, entropy_K, index_K)
    total = terms.loss_K.sum()
    return TokenLoss(total, *observe(_parts(options, terms, entropy_K), terms.targets.staleness_K))


def _terms(
    options: LossOptions,
    targets: Targets,
    logp_K: Tensor,
    entropy_K: Tensor,
    index_K: Tensor | None,
    only: frozenset[str] = frozenset(),
) -> _Terms:
    if index_K is not None:
        if not options.separable:
            raise TrainerError(
                f"{options.loss_type} with these options couples targets, and got some of a unit's; run a first forward"
                " pass and use linearised()"
            )
        targets = targets.take(index_K, only)
    targets = targets.like(logp_K)
    advantage_K = targets.advantage_K
    if options.negative_advantage_scale != 1.0:
        advantage_K = torch.where(advantage_K < 0, advantage_K * options.negative_advantage_scale, advantage_K)
    corrected = correction(options, targets, logp_K)
    keep_K = corrected.keep_K
    if keep_K is not None:  # both ends are cut: an infinite ratio of a masked target would make its gradient 0 * inf
        logp_K = torch.where(keep_K, logp_K, logp_K.detach())
    log_ratio_K = logp_K - corrected.old_K
    log_taken_K = _of_calls(targets, log_ratio_K, keep_K) if options.call_ratio else log_ratio_K
    ratio_K = log_taken_K.exp()
    phi_K = None
    match options.definition.surrogate:
        case Surrogate.CLIPPED:
            held_K = _held(log_taken_K)
            if options.delta is None:  # nothing bounds what a bad token does that became likelier
                held_K = torch.where(advantage_K < 0, log_taken_K, held_K)
            policy_K = surrogates.clipped(
                held_K.exp(),
                advantage_K,
                epsilon_low=options.epsilon_low,
                epsilon_high=options.epsilon_high,
                delta=options.delta,
            )
        case Surrogate.CISPO:
            policy_K = surrogates.cispo(logp_K, ratio_K, advantage_K, epsilon_high=options.epsilon_high)
        case Surrogate.SAPO:
            policy_K = surrogates.sapo(
                _held(log_taken_K).exp(),
                advantage_K,
                temperature_pos=options.sapo_temperature_pos,
                temperature_neg=options.sapo_temperature_neg,
            )
        case Surrogate.VESPO:
            phi_K = _phi(options, targets, log_ratio_K, advantage_K, corrected)
            policy_K = surrogates.vespo(logp_K, phi_K, advantage_K)
    if corrected.weight_K is not None and phi_K is None:  # vespo's own weight has it inside
        policy_K = policy_K * corrected.weight_K
    high_K = _high_entropy(options, entropy_K, keep_K) if options.top_entropy_quantile < 1.0 else None
    if high_K is not None:
        policy_K = policy_K * high_K
    share_K = targets.share_K(options.definition.over)
    coefficient_K = share_K if options.definition.inner is Inner.MEAN else torch.ones_like(share_K)
    policy_K = _kept(policy_K, keep_K) * coefficient_K
    loss_K = policy_K
    kl_K = None
    if options.needs_reference:
        kl_K = _kl(options, targets, logp_K, ratio_K, keep_K)
        loss_K = loss_K + options.beta * kl_K * coefficient_K
    if options.entropy_coef:
        if logp_K.requires_grad and not entropy_K.requires_grad:
            raise TrainerError(
                f"entropy_coef = {options.entropy_coef}, and the entropies carry no gradient to train with"
            )
        loss_K = loss_K - options.entropy_coef * _bonus(options, entropy_K, share_K, keep_K, high_K)
    return _Terms(loss_K, policy_K, logp_K, log_taken_K, share_K, kl_K, phi_K, high_K, targets, corrected)


def _of_calls(targets: Targets, log_ratio_K: Tensor, keep_K: Tensor | None) -> Tensor:
    """Return the log-ratio of each target's call: the mean over the call's targets."""
    size_K = call_sum(torch.ones_like(log_ratio_K) if keep_K is None else keep_K.to(log_ratio_K.dtype), targets)
    return call_sum(_kept(log_ratio_K, keep_K), targets) / size_K.clamp(min=1.0)


def _held(log_ratio_K: Tensor) -> Tensor:
    """Return log-ratios for a function that is flat where ratios are large: far beyond any bound, and before their type is
    at its end, they go no further and have no gradient. An infinite ratio would make the gradient 0 * inf."""
    return log_ratio_K.clamp(max=math.log(torch.finfo(log_ratio_K.dtype).max) / 2)


def _phi(
    options: LossOptions, targets: Targets, log_ratio_K: Tensor, advantage_K: Tensor, corrected: Correction
) -> Tensor:
    log_w_K = log_ratio_K.detach().clamp(-20.0, 20.0)
    if corrected.weight_K is not None:
        log_w_K = log_w_K + corrected.weight_K.log().clamp(-20.0, 20.0)
    return surrogates.vespo_weight(
        call_sum(_kept(log_w_K, corrected.keep_K), targets),
        advantage_K,
        k_pos=options.vespo_k_pos,
        lambda_pos=options.vespo_lambda_pos,
        k_neg=options.vespo_k_neg,
        lambda_neg=options.vespo_lambda_neg,
    )


def _kl(options: LossOptions, targets: Targets, logp_K: Tensor, ratio_K: Tensor, keep_K: Tensor | None) -> Tensor:
    if targets.reference_K is None:
        raise TrainerError(
            f"beta = {options.beta} needs the log-probs of the reference policy: give Targets.of(..., reference_K=...)"
        )
    kl_K = surrogates.kl(logp_K, targets.reference_K)
    return _kept(kl_K * ratio_K if options.use_bias_correction_kl else kl_K, keep_K)


def _high_entropy(options: LossOptions, entropy_K: Tensor, keep_K: Tensor | None) -> Tensor:
    found_K = entropy_K.detach()
    among_K = found_K if keep_K is None else found_K[keep_K]
    if not len(among_K):
        return torch.zeros_like(found_K)
    threshold = torch.quantile(among_K, 1 - options.top_entropy_quantile)
    return (found_K >= threshold).to(found_K.dtype)


def _bonus(
    options: LossOptions, entropy_K: Tensor, share_K: Tensor, keep_K: Tensor | None, high_K: Tensor | None
) -> Tensor:
    factor_K = _kept(share_K, keep_K)
    if high_K is not None:  # the mean is over these alone
        among = (factor_K * high_K).sum()
        factor_K = factor_K * high_K * (factor_K.sum() / among if among > 0 else 0.0)
    if options.definition.inner is Inner.CONSTANT:
        factor_K = factor_K * options.max_completion_length
    return _kept(entropy_K, keep_K) * factor_K


@torch.no_grad()
def _parts(options: LossOptions, terms: _Terms, entropy_K: Tensor) -> dict[str, Tensor]:
    targets, corrected = terms.targets, terms.correction
    ratio_K = terms.log_taken_K.to(torch.float64).exp()
    log_ratio_K = (terms.logp_K - targets.behaviour_K).to(torch.float64)
    drift_K = log_ratio_K.exp()
    parts: dict[str, Tensor | None] = {
        "loss": terms.loss_K,
        "policy": terms.policy_K,
        "ratio": drift_K,
        "approx_kl": drift_K - 1 - log_ratio_K,
        "entropy": entropy_K,
        "surrogate_ratio": ratio_K,
        "kl": terms.kl_K,
        "phi": terms.phi_K,
        "weight": corrected.weight_K,
        "weight_squares": None if corrected.weight_K is None else corrected.weight_K**2,
        "outside": corrected.outside_K,
        "stray": corrected.stray_K,
    }
    match options.definition.surrogate:
        case Surrogate.CLIPPED:
            parts["clipped_low"] = (ratio_K < 1 - options.epsilon_low) & (targets.advantage_K < 0)
            parts["clipped_high"] = (ratio_K > 1 + options.epsilon_high) & (targets.advantage_K > 0)
        case Surrogate.CISPO:
            parts["clipped_high"] = (ratio_K > options.epsilon_high) & (targets.advantage_K > 0)
    keep_K = corrected.keep_K
    if keep_K is not None:
        parts |= {"masked": ~keep_K, "masked_share": terms.share_K * ~keep_K}
    if terms.high_K is not None:
        parts["low_entropy"] = _kept(1 - terms.high_K, keep_K)
    return {name: values_K for name, values_K in parts.items() if values_K is not None}


def _kept(values_K: Tensor, keep_K: Tensor | None) -> Tensor:
    return values_K if keep_K is None else torch.where(keep_K, values_K, 0.0)
