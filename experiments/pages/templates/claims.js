// Claims: rows open and close; an image is taken from the list of figures when its row is first opened.
const claimButtons = [...document.querySelectorAll("#claims-table .name button")];

function setClaim(button, open) {
  const more = byId(button.getAttribute("aria-controls"));
  button.setAttribute("aria-expanded", String(open));
  more.hidden = !open;
  const empty = more.querySelector("[data-image]:empty");
  const source = empty && byId(empty.dataset.image)?.querySelector("img");
  if (open && source) empty.append(source.cloneNode());
}
const isOpen = (button) => button.getAttribute("aria-expanded") === "true";

for (const button of claimButtons) {
  setClaim(button, false);
  button.addEventListener("click", () => setClaim(button, !isOpen(button)));
  // The rest of the row is a larger target for the mouse; words in it can still be selected.
  button.closest("tr").addEventListener("click", (event) => {
    if (!event.target.closest("button, a") && getSelection().isCollapsed) setClaim(button, !isOpen(button));
  });
}
const openAll = byId("open-all");
openAll?.addEventListener("click", () => {
  const open = claimButtons.some((button) => !isOpen(button));
  for (const button of claimButtons) setClaim(button, open);
  openAll.setAttribute("aria-pressed", String(open));
  openAll.textContent = open ? "Close all" : "Open all";
});
addEventListener("beforeprint", () => {
  for (const button of claimButtons) setClaim(button, true);
  for (const details of document.querySelectorAll("details")) details.open = true;
});
// A link to what lies in closed details opens them.
function openTarget() {
  const target = location.hash.length > 1 ? byId(decodeURIComponent(location.hash.slice(1))) : null;
  if (target?.tagName === "DETAILS") target.open = true;
}
addEventListener("hashchange", openTarget);
openTarget();
